"""Verifies a micro model of every type in another process, so that one that aborts or hangs costs only its row: the next gets a new process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tinyserve_gguf import _llama
from tinyserve_gguf._types import weight_types
from tinyserve_gguf.errors import OptionError, TinyserveError
from tinyserve_gguf.micro import EMBED, FF, N_EXPERTS, N_USED, write_micro
from tinyserve_gguf.placement import pick_device
from tinyserve_gguf.verify import VerifyOptions, verify

BATCHES = tuple(range(1, 65))  # tokens
BATCHES_QUICK = (1, 2, 3, 4, 5, 8, 9, 32, 33, 64)
CACHES = ("minimum", "50%", "all")
LIMIT_S = 300  # of one type

Show = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class TypeRow:
    """What was found for one type."""

    type: str
    imatrix: bool  # it was made with a synthetic one, because it cannot be made without
    supported: bool  # the device has kernels for it
    identical: bool
    nmse: float | None
    worst_batch: int | None  # tokens
    threshold: float | None
    reference: str  # whose dequantiser: "gguf" or "ggml"
    maths: str  # who multiplied in float64
    reason: str  # why it does not hold, or why it is not supported

    @property
    def holds(self) -> bool:
        """Also where the device has no kernels: such a model is refused in one line, before anything is loaded."""
        return not self.supported or not self.reason


def chosen_types(text: str) -> list[str]:
    """Names of types: "all", or some with commas between. OptionError for one that weights cannot have here."""
    known = list(weight_types())
    if text.strip().lower() == "all":
        return known
    names = [part.strip().upper() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise OptionError(f"weights cannot be of type {name or repr(text)} in this llama.cpp; they can be {', '.join(known)}, or all")
    return list(dict.fromkeys(names))


def verify_types(names: Sequence[str], options: VerifyOptions, show: Show) -> list[TypeRow]:
    """A row for each type. Everything in `options` but the path counts."""
    pick_device(options.device)  # refuses a name that there is not
    rows = []
    worker = None
    try:
        for i, name in enumerate(names):
            show(name, i / len(names))
            worker = worker or _Worker(options)
            rows.append(worker.check(name))
            if not worker.is_sound:
                worker.close()
                worker = None
    finally:
        if worker:
            worker.close()
    return rows


class _Worker:
    """A process that verifies one type after the other, until one costs it its life."""

    def __init__(self, options: VerifyOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, asdict(options)), daemon=True)
        self._process.start()
        self.is_sound = True
        there.close()

    def check(self, name: str) -> TypeRow:
        """The row of this type. Once the process is late or gone, the worker is no longer sound."""
        self._pipe.send(name)
        try:
            if self._pipe.poll(LIMIT_S):
                found, self.is_sound = self._pipe.recv()
            else:
                found, self.is_sound = f"not done after {LIMIT_S} s", False
        except EOFError:  # it died without a word
            self._process.join()
            found, self.is_sound = f"the process ended with {self._process.exitcode}", False
        return found if isinstance(found, TypeRow) else _failed(name, str(found))

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _failed(name: str, reason: str) -> TypeRow:
    kind = weight_types()[name]
    return TypeRow(name, kind.needs_imatrix, True, False, None, None, None, "", "", reason)


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    """Answers each name with a TypeRow, or text that says why there is none; and whether it lives on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    logging.getLogger("tinyserve_gguf").addHandler(logging.NullHandler())

    def abort(reason: str) -> None:
        pipe.send((f"llama.cpp aborts: {reason}", False))
        os._exit(1)

    with _llama.last_words(abort), TemporaryDirectory() as folder:
        while True:
            name = pipe.recv()
            try:
                pipe.send((check_type(Path(folder), name, VerifyOptions(**options)), True))
            except TinyserveError as error:
                pipe.send((str(error), True))


def check_type(folder: Path, name: str, options: VerifyOptions) -> TypeRow:
    """The row of one type, in this process; its model is written into `folder`."""
    kind, device = weight_types()[name], pick_device(options.device)
    if not all(device.multiplies(kind.type_id, ne0, ne1, N_EXPERTS, N_USED) for ne0, ne1 in ((EMBED, FF), (FF, EMBED))):
        reason = f"{device.name} has no kernels for it: such experts are refused there"
        return TypeRow(name, kind.needs_imatrix, False, False, None, None, None, "", "", reason)
    batches = BATCHES_QUICK if options.quick else BATCHES
    path = write_micro(folder / f"{name}.gguf", kind)
    caches, policies = options.caches or (CACHES[:1] if options.quick else CACHES), options.policies or ("lfru",)
    report = verify(replace(options, path=str(path), batches=batches, caches=caches, policies=policies), lambda _text, _done: None)
    row = next(row for row in report.kernels if row.type == name)
    reasons = [] if report.finite else ["llama.cpp itself gives logits that are no numbers"]
    reasons += [f"expert cache {paged.cache}: {problem}" for paged in report.paged for problem in paged.problems()]
    if not row.holds:
        reasons.append(row.problem())
    identical = all(paged.difference is None for paged in report.paged)
    worst = max(row.by_batch, key=lambda n: row.by_batch[n], default=None)
    return TypeRow(name, kind.needs_imatrix, True, identical, row.nmse, worst, row.threshold, row.reference, row.maths, "; ".join(reasons))
