"""Run Mixture-of-Experts GGUF models that do not fit in VRAM, on unmodified llama.cpp.

    from tinyserve_gguf import load

    with load("model.gguf", expert_cache="25%") as model:
        for piece in model.generate("The capital of France is", max_tokens=20):
            print(piece, end="", flush=True)
        print(model.stats().lines())

Names are imported when they are first used: `import tinyserve_gguf` alone loads no native library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyserve_gguf.chat import Conversation as Conversation
    from tinyserve_gguf.errors import AbiMismatchError as AbiMismatchError
    from tinyserve_gguf.errors import CapacityError as CapacityError
    from tinyserve_gguf.errors import ContextFullError as ContextFullError
    from tinyserve_gguf.errors import EngineError as EngineError
    from tinyserve_gguf.errors import ModelFileError as ModelFileError
    from tinyserve_gguf.errors import OptionError as OptionError
    from tinyserve_gguf.errors import TinyserveError as TinyserveError
    from tinyserve_gguf.errors import UnknownOptionError as UnknownOptionError
    from tinyserve_gguf.facts import ModelFacts as ModelFacts
    from tinyserve_gguf.facts import read_facts as read_facts
    from tinyserve_gguf.live import ExpertMap as ExpertMap
    from tinyserve_gguf.live import Resized as Resized
    from tinyserve_gguf.llama import Llama as Llama
    from tinyserve_gguf.model import Model as Model
    from tinyserve_gguf.model import load as load
    from tinyserve_gguf.offloading import offload as offload
    from tinyserve_gguf.sampling import Sampling as Sampling
    from tinyserve_gguf.session import Session as Session
    from tinyserve_gguf.stats import ReplyStats as ReplyStats
    from tinyserve_gguf.stats import Stats as Stats

__version__ = "0.1.0"

_HOMES = {
    "chat": ("Conversation",),
    "errors": (
        "AbiMismatchError",
        "CapacityError",
        "ContextFullError",
        "EngineError",
        "ModelFileError",
        "OptionError",
        "TinyserveError",
        "UnknownOptionError",
    ),
    "facts": ("ModelFacts", "read_facts"),
    "llama": ("Llama",),
    "live": ("ExpertMap", "Resized"),
    "model": ("Model", "load"),
    "offloading": ("offload",),
    "sampling": ("Sampling",),
    "session": ("Session",),
    "stats": ("ReplyStats", "Stats"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
