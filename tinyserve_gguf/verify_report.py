"""What verify found, as tables for people and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from tinyserve_gguf.verify_logits import Difference, near_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinyserve_gguf.verify import PagedRow, Report
    from tinyserve_gguf.verify_kernels import KernelRow
    from tinyserve_gguf.verify_types import TypeRow


PLAIN_WIDTH = 160  # columns, where the output is no terminal


def make_console() -> Console:
    """Stdout, for plain text."""
    console = Console(markup=False, emoji=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, highlight=False, width=PLAIN_WIDTH)


def report_tables(report: Report, console: Console) -> list[RenderableType]:
    """Tables and lines to print, in order; the last line is the verdict."""
    parts: list[RenderableType] = [f"{report.facts.name} on {report.device}: {report.n_tokens} random tokens in each run, beside llama.cpp alone"]
    if not report.finite:
        parts.append("llama.cpp alone gives logits that are no numbers: see info --check")
    if report.on_cpu:
        limit = near_limit(report.on_cpu)
        parts.append(f"llama.cpp with all experts on the CPU: logits {report.on_cpu.line()}; typically {report.on_cpu.typical:.1e} deviations")
        parts.append(f"misses on the CPU are near if they are typically within {limit:.1e}")
    paged = _table(console, "paged runs", "expert cache", "policy", "slots", "logits", "slots beside the file", "")
    for row in report.paged:
        logits = "identical" if row.difference is None else "near" if row.is_near else "differ"
        equal = f"{row.slots_checked} equal" if not row.wrong_bytes else f"{len(row.wrong_bytes)} weights differ"
        notes = "; ".join(row.problems()) or (f"{row.difference.line()}; typically {row.difference.typical:.1e}" if row.difference else "")
        paged.add_row(row.cache, row.policy, f"{row.n_slots} of {row.n_experts}", logits, equal, notes)
    kernels = _table(console, "expert matmuls beside float64", "type", "tensors", "NMSE", "at batch", "limit", "dequantised by", "multiplied by", "")
    for kernel in report.kernels:
        worst = max(kernel.by_batch, key=lambda n: kernel.by_batch[n], default="")
        numbers = [f"{kernel.nmse:.1e}", str(worst), f"{kernel.threshold:.0e}"]
        kernels.add_row(kernel.type, str(kernel.n_tensors), *numbers, kernel.reference, kernel.maths, kernel.problem())
    return [*parts, paged, kernels, "", _verdict(report.holds)]


def type_tables(rows: Sequence[TypeRow], device: str, console: Console) -> list[RenderableType]:
    """The same for `--types`."""
    table = _table(
        console, f"micro models on {device}", "type", "supported", "identical", "NMSE", "at batch", "limit", "dequantised by", "multiplied by", ""
    )
    for row in rows:
        numbers = [f"{row.nmse:.1e}", str(row.worst_batch), f"{row.threshold:.0e}"] if row.nmse is not None else ["", "", ""]
        notes = "; ".join(filter(None, ["made with an imatrix" if row.imatrix else "", row.reason]))
        identical = ("yes" if row.identical else "no") if row.supported else ""
        table.add_row(row.type, "yes" if row.supported else "no", identical, *numbers, row.reference, row.maths, notes)
    return [table, "", _verdict(all(row.holds for row in rows))]


def report_dict(report: Report) -> dict[str, Any]:
    """Everything, for programs. Errors that are not finite are null."""
    return {
        "model": str(report.facts.path),
        "name": report.facts.name,
        "device": report.device,
        "tokens": report.n_tokens,
        "finite": report.finite,
        "on_cpu": _difference_dict(report.on_cpu),
        "holds": report.holds,
        "paged": [_paged_dict(row) for row in report.paged],
        "kernels": [_kernel_dict(row) for row in report.kernels],
    }


def types_dict(rows: Sequence[TypeRow], device: str) -> dict[str, Any]:
    return {
        "device": device,
        "holds": all(row.holds for row in rows),
        "types": [{**asdict(row), "nmse": _finite(row.nmse), "holds": row.holds} for row in rows],
    }


def as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def _paged_dict(row: PagedRow) -> dict[str, Any]:
    return {
        **asdict(row),
        "difference": _difference_dict(row.difference),
        "identical": row.difference is None,
        "holds": row.holds,
        "problems": row.problems(),
    }


def _difference_dict(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {name: _finite(value) for name, value in asdict(difference).items()}


def _kernel_dict(row: KernelRow) -> dict[str, Any]:
    by_batch = {str(batch): _finite(value) for batch, value in row.by_batch.items()}
    return {**asdict(row), "by_batch": by_batch, "nmse": _finite(row.nmse), "holds": row.holds}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _verdict(holds: bool) -> str:
    return "verified: everything above holds" if holds else "NOT verified: see the last column"


def _table(console: Console, title: str, *columns: str) -> Table:
    """Ruled on a terminal, columns alone elsewhere."""
    ruled = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=ruled, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
