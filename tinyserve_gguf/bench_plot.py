"""The picture of a benchmark: decode speed over depth, a line per run, as PNG. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec

from tinyserve_gguf.bench_table import Row
from tinyserve_gguf.errors import OptionError


def check_plot(depths: Sequence[int], replies: Sequence[int]) -> None:
    """OptionError, before anything is measured, if there will be nothing to draw, or nothing to draw with."""
    if len(set(depths)) < 2 or not replies:
        raise OptionError("--plot draws decode speed over depth: give two or more --depth, and -n above 0")
    if find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib, which is not installed; run: pip install 'tinyserve-gguf[plot]'")


def curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """(depth, tokens per second) of the decode rows, by run and by length of the reply if there are several."""
    decode = [row for row in rows if row.is_timed and row.test and row.test.startswith("tg")]
    several = len({row.n_tokens for row in decode}) > 1
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in decode:
        if row.depth is not None and row.rate:
            found[f"{row.run}, tg{row.n_tokens}" if several else row.run].append((row.depth, row.rate))
    return {name: sorted(points) for name, points in found.items()}


def as_png(rows: Sequence[Row], title: str) -> bytes:
    """The picture."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, points in curves(rows).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(title=title, xlabel="tokens before", ylabel="decode, tokens per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
