"""Run Mixture-of-Experts GGUF models that do not fit in VRAM, on unmodified llama.cpp.

    from tinyserve_gguf import load

    with load("model.gguf", expert_cache="25%") as model:
        for piece in model.generate("The capital of France is", max_tokens=20):
            print(piece, end="", flush=True)
        print(model.stats().lines())
"""

from tinyserve_gguf._llama import Sampling
from tinyserve_gguf.chat import Conversation
from tinyserve_gguf.errors import (
    AbiMismatchError,
    CapacityError,
    ContextFullError,
    EngineError,
    ModelFileError,
    OptionError,
    TinyserveError,
)
from tinyserve_gguf.facts import ModelFacts, read_facts
from tinyserve_gguf.model import Model, load
from tinyserve_gguf.session import Session
from tinyserve_gguf.stats import ReplyStats, Stats

__version__ = "0.1.0"

__all__ = [
    "AbiMismatchError",
    "CapacityError",
    "ContextFullError",
    "Conversation",
    "EngineError",
    "Model",
    "ModelFacts",
    "ModelFileError",
    "OptionError",
    "ReplyStats",
    "Sampling",
    "Session",
    "Stats",
    "TinyserveError",
    "load",
    "read_facts",
]
