"""llama.cpp's samplers as sessions use them."""

from __future__ import annotations

from typing import Any

from tinyserve_gguf._llama import C, NativeContext
from tinyserve_gguf.sampling import Sampling


class Sampler:
    """A llama.cpp sampler chain: penalties, top-k, top-p, min-p, temperature, draw."""

    def __init__(self, sampling: Sampling, context: NativeContext) -> None:
        self._chain: Any = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        if sampling.repeat_penalty != 1.0 and sampling.repeat_last_n != 0:
            last_n = context.n_ctx if sampling.repeat_last_n < 0 else sampling.repeat_last_n
            self._add(C.llama_sampler_init_penalties(context.model.n_vocab, last_n, sampling.repeat_penalty, 0.0, 0.0))
        if sampling.temp <= 0:
            self._add(C.llama_sampler_init_greedy())
            return
        self._add(C.llama_sampler_init_top_k(sampling.top_k))
        self._add(C.llama_sampler_init_top_p(sampling.top_p, 1))
        self._add(C.llama_sampler_init_min_p(sampling.min_p, 1))
        self._add(C.llama_sampler_init_temp(sampling.temp))
        self._add(C.llama_sampler_init_dist(C.LLAMA_DEFAULT_SEED if sampling.seed < 0 else sampling.seed))

    def _add(self, sampler: Any) -> None:
        C.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, context: NativeContext) -> int:
        """Draw the next token from the logits of the last decoded token, and take it into the history."""
        return int(C.llama_sampler_sample(self._chain, context.handle, -1))

    def accept(self, token: int) -> None:
        """Take a prompt token into the history that the repeat penalty looks at."""
        C.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        if self._chain:
            C.llama_sampler_free(self._chain)
            self._chain = None
