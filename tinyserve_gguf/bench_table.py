"""Rows of a benchmark: what they hold, the bounds they are judged by, and how they are printed. Pure: measures nothing."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from tinyserve_gguf.bench_measure import Measured, percentile
from tinyserve_gguf.plan import GIB, size
from tinyserve_gguf.stats import LayerTime, hit_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of results. None: does not apply, or is not known. Rates and bounds in tokens per second, sizes in bytes, GB/s of 10^9."""

    run: str  # what was measured, for people
    runner: str  # "tinyserve-gguf" or "llama.cpp"
    expert_cache: str | None = None  # as asked for
    policy: str | None = None
    miss: str | None = None  # what happens to misses of decode
    engine: str | None = None  # which one runs, and why
    n_cpu_moe: int | None = None  # llama.cpp: blocks whose experts are on the CPU
    warm: bool | None = None  # start: whether a hot list filled the pool
    fill_seconds: float | None = None  # what that took, and load_seconds does not hold
    all_resident: bool = False  # everything is on the device: nothing moves, and the CPU computes nothing
    test: str | None = None  # "pp512", "tg64 @ d4096" or "needle2000"; None in a row with an error
    n_tokens: int | None = None
    depth: int | None = None  # tokens in the context before the test
    window: int | None = None  # tokens that the context holds at most, the oldest leave; None = all of them
    tokens: str | None = None  # "random", "text FILE" or "generated text"
    repeats: int | None = None
    rate: float | None = None
    rate_stdev: float | None = None  # over the repeats; None for one
    ttft_ms: float | None = None  # from the prompt to the first token
    p50_ms: float | None = None  # from token to token
    p99_ms: float | None = None
    hit_rate: float | None = None  # of this test: of prefill in a pp row, of decode in a tg row
    host_us_per_token: float | None = None  # tg: time in the shim on the calling thread
    mb_per_token: float | None = None  # over the link, MB of 10^6
    cpu_rows_per_token: float | None = None  # experts that the CPU computed because they were missed
    admitted_per_token: float | None = None  # of these, entered the pool in the background
    wait_cpu_ms: float | None = None  # tg: per token, of the calling thread for the CPU
    wait_device_ms: float | None = None  # and for the device
    link_gbps: float | None = None  # measured, or what it was throttled to
    link_throttled: bool = False
    bound_from: str | None = None  # the run that gave the compute time of the bounds
    serial_bound: float | None = None
    of_serial: float | None = None  # rate over bound
    overlapped_bound: float | None = None
    of_overlapped: float | None = None
    expert_bytes: int | None = None  # device memory of experts: slots, or llama.cpp's tensors
    stage_bytes: int | None = None  # device memory that prefill streams through
    device_bytes: int | None = None  # all that the run took on the device, by what was free before and after; None on the CPU
    load_seconds: float | None = None
    number: str | None = None  # needle: what was hidden
    needle_at: float | None = None  # 0..1 of the text around it
    found: bool | None = None
    profile: tuple[LayerTime, ...] | None = None  # tg: microseconds a token, of a pass behind the test
    reply: str | None = None
    error: str | None = None  # why nothing was measured

    @property
    def is_timed(self) -> bool:
        """A pp or tg row with a result."""
        return self.error is None and self.found is None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    model: dict[str, Any]
    setup: dict[str, Any]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


# ---- bounds ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """How fast an engine can be that moves these bytes over this link, in tokens per second."""

    serial: float  # if copies and compute take turns
    overlapped: float  # if the longer of them hides the other: nothing beats this


def bounds(full_rate: float, bytes_per_token: float, link: float) -> Bounds:
    """`full_rate`: tokens per second with everything on the device. `link`: bytes per second."""
    compute, copy = 1 / full_rate, bytes_per_token / link
    return Bounds(serial=1 / (compute + copy), overlapped=1 / max(compute, copy))


def with_bounds(rows: Iterable[Row]) -> list[Row]:
    """Rows of tinyserve-gguf, unless the CPU computes their misses, get their bounds from a row of the same test and window with everything on the
    device: llama.cpp's own, else the one whose cache holds all experts. A row is not judged by itself."""
    rows = list(rows)
    full: dict[tuple[str | None, int | None], Row] = {}
    for row in sorted(rows, key=lambda row: row.runner != "llama.cpp"):
        if row.all_resident and row.is_timed:
            full.setdefault((row.test, row.window), row)
    return [_bounded(row, full.get((row.test, row.window))) for row in rows]


def _bounded(row: Row, full: Row | None) -> Row:
    if full is None or full is row or not full.rate or row.runner == "llama.cpp" or not (row.rate and row.link_gbps) or row.cpu_rows_per_token:
        return row
    found = bounds(full.rate, (row.mb_per_token or 0) * 1e6, row.link_gbps * 1e9)
    return replace(
        row,
        bound_from=full.run,
        serial_bound=found.serial,
        of_serial=row.rate / found.serial,
        overlapped_bound=found.overlapped,
        of_overlapped=row.rate / found.overlapped,
    )


def guard_lines(rows: Iterable[Row]) -> list[str]:
    """A line for every decode row with misses: against the fastest that llama.cpp reached in the same test with no more memory for experts."""
    rows = [row for row in rows if row.is_timed and row.rate and (row.test or "").startswith("tg")]
    lines = []
    for row in rows:
        if row.runner == "llama.cpp" or row.all_resident:
            continue
        room = (row.expert_bytes or 0) + (row.stage_bytes or 0)
        rivals = [r for r in rows if r.runner == "llama.cpp" and r.test == row.test and r.n_cpu_moe and (r.expert_bytes or 0) <= room]
        if not rivals:
            continue
        best = max(rivals, key=lambda r: r.rate or 0.0)
        ratio = (row.rate or 0.0) / (best.rate or 1.0)
        line = f"{row.run}, {row.test}: {ratio:.2f} times the {best.rate:.1f} tok/s of {best.run}, llama.cpp's best with no more memory for experts"
        lines.append(line if ratio >= 1 else f"{line}: use that, a larger --expert-cache, or --miss auto")
    return lines


def measured_row(base: Row, measured: Measured) -> Row:
    """`base` with the numbers of one test."""
    rates, counts, case = measured.rates, measured.counts, measured.case
    n = case.n * len(rates)
    return replace(
        base,
        test=case.name,
        n_tokens=case.n,
        depth=case.depth,
        repeats=len(rates),
        rate=statistics.fmean(rates),
        rate_stdev=statistics.stdev(rates) if len(rates) > 1 else None,
        ttft_ms=statistics.fmean(measured.first) * 1e3 if measured.first else None,
        p50_ms=percentile(measured.steps, 0.5) * 1e3 if measured.steps else None,
        p99_ms=percentile(measured.steps, 0.99) * 1e3 if measured.steps else None,
        hit_rate=hit_rate(counts) if counts else None,
        host_us_per_token=None if measured.host_seconds is None else measured.host_seconds * 1e6 / n,
        mb_per_token=counts.bytes_link / 1e6 / n if counts else None,
        cpu_rows_per_token=counts.cpu_rows / n if counts else None,
        admitted_per_token=counts.admitted / n if counts else None,
        wait_cpu_ms=None if measured.wait_cpu_seconds is None else measured.wait_cpu_seconds * 1e3 / n,
        wait_device_ms=None if measured.wait_device_seconds is None else measured.wait_device_seconds * 1e3 / n,
    )


# ---- formats --------------------------------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """One object: model, setup, rows, notes."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False)


def as_csv(report: Report) -> str:
    """The rows, with the fields of `Row` as columns; empty for None. A profile is no column."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(Row) if f.name != "profile"], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(asdict(row) for row in report.rows)
    return out.getvalue().rstrip("\n")


COLUMNS = (
    "run",
    "test",
    "tokens",
    "tok/s",
    "TTFT ms",
    "p50 ms",
    "p99 ms",
    "hit rate",
    "MB/token",
    "CPU rows/token",
    "serial bound",
    "overlapped bound",
    "experts GiB",
    "device GiB",
)


def as_markdown(report: Report) -> str:
    """A line about the setup, the table, then profiles, needles and notes."""
    model, setup = report.model, report.setup
    link = f"link {setup['link_gbps']:.1f} GB/s as measured" if setup["link_gbps"] else "link not measured"
    head = (
        f"{model['name']} ({model['architecture']}, {size(model['file_bytes'])}) on {setup['device']} ({setup['device_description']}), {link}; "
        f"ubatch {setup['n_ubatch']}, {setup['n_threads']} threads, context {setup['n_ctx']}; decode after {setup['warmup']} tokens of warm-up"
    )
    timed = [row for row in report.rows if row.is_timed]
    parts = [head, "\n".join(table(COLUMNS, [_cells(row) for row in timed]))] if timed else [head]
    parts += ["\n".join(_profile_lines(row, row.profile)) for row in timed if row.profile]
    parts += ["\n".join(_needle_lines(row)) for row in report.rows if row.found is not None]
    engines = dict.fromkeys(f"{row.run}: {row.engine}" for row in report.rows if row.engine and not row.all_resident)
    misses = dict.fromkeys(f"{row.run}: misses are {row.miss}" for row in report.rows if row.cpu_rows_per_token)
    notes = [f"{row.run}: not measured: {row.error}" for row in report.rows if row.error] + [*engines, *misses, *report.notes]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    def number(value: float | None, pattern: str = "{:.1f}") -> str:
        return "" if value is None else pattern.format(value)

    def bound(value: float | None, reached: float | None) -> str:
        return "" if value is None else f"{value:.1f} ({reached:.0%})"

    expert_bytes = None if row.expert_bytes is None else (row.expert_bytes + (row.stage_bytes or 0)) / GIB
    return [
        row.run,
        row.test or "",
        row.tokens or "",
        number(row.rate, "{:.2f}") + number(row.rate_stdev, " ± {:.2f}"),
        number(row.ttft_ms),
        number(row.p50_ms, "{:.2f}"),
        number(row.p99_ms, "{:.2f}"),
        number(row.hit_rate, "{:.1%}"),
        number(row.mb_per_token, "{:.2f}"),
        number(row.cpu_rows_per_token or None, "{:.2f}"),
        bound(row.serial_bound, row.of_serial),
        bound(row.overlapped_bound, row.of_overlapped),
        number(expert_bytes, "{:.2f}"),
        number(None if row.device_bytes is None else row.device_bytes / GIB, "{:.2f}"),
    ]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 3) -> list[str]:
    """Lines of a markdown table with even columns, numbers (behind the text columns) to the right."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) if i < text_columns else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join("-" * width if i < text_columns else "-" * (width - 1) + ":" for i, width in enumerate(widths)) + " |"
    return [line(titles), rule, *map(line, rows)]


def _profile_lines(row: Row, profile: Sequence[LayerTime]) -> list[str]:
    """A line a layer, and their sums beside what was measured without the profile."""
    parts = ("attention", "lookup", "copy", "experts", "total")
    sums = [sum(getattr(time, part) for time in profile) for part in parts]
    cells = [["output" if time.block is None else str(time.block), *(f"{getattr(time, part):.1f}" for part in parts)] for time in profile]
    return [
        f"{row.run}, {row.test}: microseconds a token; {sums[-1] / 1e3:.3f} ms in all, {row.p50_ms:.3f} ms (median) when not profiled",
        "",
        *table(("block", *parts), [*cells, ["all", *(f"{value:.1f}" for value in sums)]], text_columns=1),
    ]


def _needle_lines(row: Row) -> list[str]:
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join((row.reply or "").split()))
    return [
        f"needle, {row.run}: {'found' if row.found else 'NOT found'} ({row.number} at {row.needle_at:.0%} of {row.n_tokens} tokens of {row.tokens})",
        f"  reply: {shown}",
    ]
