"""`doctor`: what of this machine works, what is slow, what is broken and how to mend it. What was measured is kept for `info`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tinyserve_gguf import doctor_checks as checks
from tinyserve_gguf.doctor_checks import BROKEN, Finding
from tinyserve_gguf.facts import read_facts


@dataclass(slots=True)
class Report:
    findings: list[Finding] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # as machine.Rates has them
    device: str = ""  # that was measured

    @property
    def is_broken(self) -> bool:
        return any(finding.status == BROKEN for finding in self.findings)

    @property
    def works(self) -> str:
        """The last line: what can be done on this machine."""
        if self.is_broken:
            return "nothing runs until what is broken is mended"
        if not self.device or self.device == "CPU":
            return "everything runs, on the CPU: chat, bench, verify; a GPU would make it faster"
        return f"everything runs, on {self.device}"

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON. Rates in bytes, and `prefill` in multiply-adds, per second."""
        lines = [{"name": f.name, "status": f.status, "text": f.text, "fix": f.fix} for f in self.findings]
        return {"findings": lines, "rates": self.rates, "device": self.device, "works": self.works, "broken": self.is_broken}


Show = Callable[[str], None]  # hears what is looked at now


def examine(model: str | None, show: Show) -> Report:
    """Every check. ModelFileError for a MODEL that cannot be read."""
    report, facts = Report(), None
    show("software")
    report.findings += [*checks.python(), *checks.llama_cpp()]
    if not report.is_broken:
        facts = read_facts(model) if model else None
        report.findings += checks.shim()
    show("system")
    report.findings += [*checks.system(), *checks.memory(), *checks.driver()]
    if not report.is_broken:
        from tinyserve_gguf import doctor_rates as rates  # loads the native library
        from tinyserve_gguf.placement import pick_device

        report.device = pick_device("auto").name
        report.findings += rates.gpus()
        report.findings += rates.measure(report.rates, show)
        if facts:
            show("disk")
            report.findings += rates.disk(facts)
    return report
