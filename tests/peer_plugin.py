"""pytest plugin for llama-cpp-python's own tests: `llama_cpp.Llama` is ours, with a quarter of the experts in slots, and what the tests download from
a model hub are models of ours. PEER_MODELS is a JSON object of file names in the hub and paths."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "passive"

import llama_cpp

from tinyserve_gguf import Llama

MODELS: dict[str, str] = json.loads(os.environ["PEER_MODELS"])
paged: set[str] = set()  # tests that opened a paged model
now = ""


class Paged(Llama):
    """As the tests make it, on the CPU that plays the device."""

    def __init__(self, model_path: str, **options: Any) -> None:
        moe = not options.get("vocab_only") and "mamba" not in model_path
        super().__init__(model_path, **options | ({"expert_cache": "25%", "device": "CPU"} if moe else {}))
        assert moe == (not options.get("vocab_only") and self.is_paged)
        if moe:
            paged.add(now)


def stand_in(name: str, **contents: Any) -> None:
    """A module that the tests import: one for this purpose is a download less."""
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


stand_in("scipy")
stand_in("scipy.special", log_softmax=None)  # imported, never used
stand_in("huggingface_hub", hf_hub_download=lambda _repository, filename: MODELS[filename])
llama_cpp.Llama = Paged


def pytest_runtest_setup(item: Any) -> None:
    global now
    now = item.name


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line("PAGED " + json.dumps(sorted(paged)))
