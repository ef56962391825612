"""Logits of stock llama.cpp and of paged models over the same tokens, as hashes. The reference is always llama.cpp, never this package."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from pathlib import Path

import numpy as np

from tinyserve_gguf._llama import ContextOptions, NativeContext, NativeModel, Offload
from tinyserve_gguf.model import Model

PROMPTS = (1, 7, 40, 513, 519)  # around n * ubatch + 1..8
UBATCH = 512
DECODE = 64
THREADS = 1  # the models are tiny: with two threads OpenMP's barriers take most of the time, all of it where other programs want the cores


def options(n_ctx: int, threads: int = THREADS) -> ContextOptions:
    return ContextOptions(n_ctx=n_ctx, n_batch=UBATCH, n_ubatch=UBATCH, n_threads=threads)


def run(native: NativeModel, prompt: int, decode: int = DECODE, *, seed: int = 0, n_ctx: int = 640, threads: int = THREADS) -> str:
    """Hash of the logits after a prompt of random tokens and after each of `decode` random tokens."""
    rng = random.Random(prompt * 1000 + seed)
    context = NativeContext(native, options(n_ctx, threads))
    digest = hashlib.sha256()
    try:
        tokens = [rng.randrange(5, native.n_vocab - 5) for _ in range(prompt + decode)]
        for start in range(0, prompt, UBATCH):
            context.decode(tokens[start : min(prompt, start + UBATCH)], start, want_logits=True)
        steps = range(prompt, prompt + decode)
        for logits in (context.logits(), *(decode_one(context, tokens[i], i) for i in steps)):
            assert np.isfinite(logits).all(), "the model itself gives no finite logits"
            digest.update(logits.tobytes())
    finally:
        context.close()
    return digest.hexdigest()


def decode_one(context: NativeContext, token: int, position: int) -> np.ndarray:
    context.decode([token], position, want_logits=True)
    return context.logits()


@cache
def stock(path: Path, decode: int = DECODE, prompts: tuple[int, ...] = PROMPTS, device: int = 0) -> dict[int, str]:
    """Hash per prompt length by llama.cpp alone, everything on one device, with the same kernels: no repacked weights."""
    native = NativeModel(str(path), Offload(device) if device else None, extra_bufts=False)
    try:
        return {prompt: run(native, prompt, decode) for prompt in prompts}
    finally:
        native.close()


def paged(model: Model, decode: int = DECODE, prompts: tuple[int, ...] = PROMPTS) -> dict[int, str]:
    """The same hashes by a paged model, with its cache as warm as the runs before left it."""
    hashes = {}
    for prompt in prompts:
        hashes[prompt] = run(model.native, prompt, decode)
        model.check_integrity()
    return hashes
