"""Runs info, the planner and the loader on damaged files, in worker processes that may die, hang or eat memory without harm to the run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

LIMIT_S = 20  # of one file
LIMIT_BYTES = 1 << 30  # resident, of a worker; the files have less than a megabyte
LIMIT_ADDRESS = 32 << 30  # address space: what nobody touches may be reserved, but not without end
GAVE_UP = "llama.cpp gives up"  # aborts, which the command line turns into one line
OUTCOMES = {"loaded", "refused by info", "refused by the planner", "refused by the loader", GAVE_UP}
BASES = {
    "qwen3moe": {"layers": 2, "experts": 4, "ff": 32, "gate": "Q8_0", "up": "Q4_0", "down": "Q8_0"},
    "gpt-oss": {"layers": 2, "experts": 4, "ff": 32},
    "deepseek2-mtp": {"layers": 2, "experts": 4, "ff": 32},
    "nemotron_h_moe": {"layers": 4, "experts": 4, "ff": 32},
    "gemma4": {"layers": 2, "experts": 4, "ff": 32},
    "grovemoe": {"layers": 2, "experts": 4, "ff": 64},
}


@dataclass
class Tally:
    """What came of the files."""

    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # of OUTCOMES
    failures: list[str] = field(default_factory=list)

    def count(self, outcome: str, seed: int, index: int) -> None:
        known = outcome.partition(":")[0]
        self.tried += 1
        if known in OUTCOMES:
            self.outcomes[known] += 1
        else:
            self.failures.append(f"seed {seed}, file {index}: {outcome}")

    def line(self) -> str:
        parts = ", ".join(f"{n:,} {what}" for what, n in self.outcomes.most_common())
        return f"fuzz: {self.tried:,} damaged files: {parts}; {len(self.failures)} failures"


def build_bases(folder: Path) -> list[Path]:
    from synthetic import build

    return [build(name, folder / f"{name}.gguf", **changes) for name, changes in BASES.items()]


def try_file(path: Path) -> str:
    """What info, the planner and the loader make of the file; anything but a TinyserveError is a failure."""
    from tinyserve_gguf import TinyserveError, load, read_facts
    from tinyserve_gguf.cli.info import facts_dict
    from tinyserve_gguf.cli.outlook import Asked, outlook
    from tinyserve_gguf.placement import plan_for

    step = "info"
    try:
        facts = read_facts(path)
        json.dumps(facts_dict(facts, Asked()), allow_nan=False)
        for vram in (None, 8.0):
            json.dumps(outlook(facts, Asked(vram=vram)).as_dict(), allow_nan=False)
        step = "the planner"
        for cache in ("auto", "25%", "all"):
            plan, _ = plan_for(facts, expert_cache=cache, device="CPU")
            plan.lines()
        step = "the loader"
        load(path, device="CPU", n_threads=1, n_ctx=64, expert_cache="all").close()
    except TinyserveError as error:
        text = str(error)
        return f"refused by {step}" if "\n" not in text and text else f"a message of several lines from {step}: {text!r}"
    except BaseException:
        return f"{step} raised {' | '.join(traceback.format_exc().strip().splitlines()[-5:])}"
    return "loaded"


def fuzz(
    bases: list[Path],
    folder: Path,
    seed: int,
    enough: Callable[[Tally], bool],
    first: int = 0,
    *,
    attempt: Callable[[Path], str] = try_file,
    limit_s: float = LIMIT_S,
) -> Tally:
    """Try files `first`, `first` + 1, ... of `seed` until `enough`."""
    tally, index = Tally(), first
    while not enough(tally):
        with _Worker(bases, folder, seed, attempt, limit_s) as worker:
            while worker.lives and not enough(tally):
                tally.count(worker.outcome(index), seed, index)
                index += 1
    return tally


class _Worker:
    """A process that tries one file after the other until one of them kills it."""

    def __init__(self, bases: list[Path], folder: Path, seed: int, attempt: Callable[[Path], str], limit_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.lives = True
        self._limit_s = limit_s
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, bases, folder, seed, attempt), daemon=True)
        self._process.start()
        there.close()
        self._pipe.recv()  # it has started; imports are no part of the time of a file

    def outcome(self, index: int) -> str:
        self._pipe.send(index)
        try:
            found = self._pipe.recv() if self._pipe.poll(self._limit_s) else f"not done after {self._limit_s} s"
        except (EOFError, ConnectionError):
            self._process.join()
            found = f"the process ended with {self._process.exitcode}"
        self.lives = found.partition(":")[0] in OUTCOMES - {GAVE_UP}
        return str(found)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Connection, bases: list[Path], folder: Path, seed: int, attempt: Callable[[Path], str]) -> None:
    """The worker: for each index that comes, an outcome goes back."""
    from mutations import damaged

    from tinyserve_gguf import _llama

    logging.getLogger("tinyserve_gguf").addHandler(logging.NullHandler())
    logging.getLogger("tinyserve_gguf").propagate = False
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_ADDRESS, LIMIT_ADDRESS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path = folder / f"fuzz-{os.getpid()}.gguf"

    def abort(reason: str) -> None:
        pipe.send(f"{GAVE_UP}: {reason}")
        os._exit(1)

    with _llama.last_words(abort):
        pipe.send("started")
        while True:
            index = pipe.recv()
            data, done = damaged(bases[index % len(bases)], seed, index)
            path.write_bytes(data)
            outcome = attempt(path)
            peak = peak_bytes()
            if peak > LIMIT_BYTES:
                outcome = f"{peak:,} bytes resident"
            pipe.send(outcome if outcome in OUTCOMES else f"{outcome} ({done})")


def peak_bytes() -> int:
    """Most resident memory of this process so far. Not getrusage's: that begins with the peak of the process that started this one."""
    status = Path("/proc/self/status").read_text("ascii", "replace")
    return int(re.findall(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)[0]) * 1024


def until(n: int = 0, seconds: float = 0) -> Callable[[Tally], bool]:
    """Enough after `n` files, or after so many seconds."""
    end = time.monotonic() + seconds
    return lambda tally: tally.tried >= n if n else time.monotonic() >= end


# ---- attempts that go wrong: here, because a worker must find them by the name of their module --------------------------------------------------


def crashing(_path: Path) -> str:
    os.kill(os.getpid(), 11)
    return ""


def hanging(_path: Path) -> str:
    time.sleep(60)
    return ""


def hungry(_path: Path) -> str:
    return "loaded" if b"x" * (LIMIT_BYTES + (1 << 24)) else ""
