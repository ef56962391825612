"""The host pool is the file: memory, limits, broken files, progress, and what is said of it. The rungs below are in tests/c/test_host.c."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import environment
from synthetic import split

import tinyserve_gguf.model
from tinyserve_gguf import load
from tinyserve_gguf._llama import NativeModel
from tinyserve_gguf.errors import EngineError, ModelFileError
from tinyserve_gguf.facts import ModelFacts, read_facts

ModelFile = Callable[..., Path]

CHILD = """
import json, resource, sys
from tinyserve_gguf import Sampling, load

def resident():
    lines = [line.split() for line in open("/proc/self/status")]
    return {key: int(line[1]) * 1024 for line in lines for key in ("VmRSS", "RssAnon") if line[0] == key + ":"}

path, cache, lock = sys.argv[1:]
if lock:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(lock), int(lock)))
before = resident()
with load(path, expert_cache=cache, device="CPU", n_ctx=256, n_ubatch=32) as model:
    loaded = resident()
    text = "".join(model.generate("The capital of France is", max_tokens=8, sampling=Sampling(temp=0)))
    used, stats = resident(), model.stats()
    grown = {name: [state[name] - before[name] for state in (loaded, used)] for name in before}
    print(json.dumps({**grown, "text": text, "rung": stats.pager.host_rung, "lines": stats.lines(), "decided": model.lines()}))
"""


def child(path: Path, cache: str, lock: str = "") -> dict[str, Any]:
    """Growth in bytes, [after the load, after a reply], and what was said."""
    command = [sys.executable, "-c", CHILD, str(path), cache, lock]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env=environment(), timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def experts_of(path: Path) -> int:
    facts = read_facts(path)
    return sum(part.weight.n_bytes for layer in facts.expert_layers for part in layer.parts)


# ---- memory ---------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def just_written(demo_model: Path, tmp_path: Path) -> Iterator[Path]:
    """The demo model in a page cache of small pieces. What the kernel has read ahead lies there in pieces of up to 2 MiB, which it maps whole: then
    VmRSS counts the neighbours of every row that llama.cpp looks up in its own mapping, 120 MB that no process has for itself."""
    path = Path(shutil.copy(demo_model, tmp_path))
    yield path
    path.unlink()


def test_memory_of_a_paged_model(just_written: Path) -> None:
    """The experts are pages of the file: of our own are only the slots and the rest of the model."""
    file, experts = just_written.stat().st_size, experts_of(just_written)
    seen = child(just_written, "10%")
    assert "Paris" in seen["text"]
    assert seen["VmRSS"][0] <= 0.5 * file, "nobody has read the experts yet"
    assert seen["VmRSS"][1] <= 1.1 * file
    assert seen["RssAnon"][1] <= file - experts + 0.2 * experts + (64 << 20)  # twice the slots' share for the stage, and llama.cpp's buffers


def test_memory_of_a_resident_model(just_written: Path) -> None:
    """On the CPU device the slots are memory too: one copy there, and the mapping gives its pages back."""
    seen = child(just_written, "all")
    assert "Paris" in seen["text"]
    assert max(seen["VmRSS"]) <= 1.1 * just_written.stat().st_size


def test_no_memory_may_be_locked(demo_model: Path) -> None:
    seen = child(demo_model, "10%", "4096")
    assert "Paris" in seen["text"]
    assert seen["rung"] == "mapped"


# ---- what is said ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["25%", "all"])
def test_the_rung_is_told(model_file: ModelFile, cache: str) -> None:
    with load(model_file("gpt-oss"), expert_cache=cache, device="CPU", n_ctx=256) as model:
        pager = model.stats().pager
        assert pager is not None
        assert pager.host_rung == "mapped"
        assert pager.host == model.host_pool
        assert model.host_pool.startswith("mapped: ")
        assert model.stats().lines()[1] == f"host pool: {model.host_pool}"
        assert model.stats().as_dict()["host"] == model.host_pool
        assert model.lines() == [*model.plan.lines(), f"engine: {model.engine}; host pool: {model.host_pool}", f"misses: {model.miss}"]
        assert len(model.lines()) == 5


# ---- files ----------------------------------------------------------------------------------------------------------------------------------


def facts_then(monkeypatch: pytest.MonkeyPatch, change: Callable[[ModelFacts], None]) -> None:
    """Something happens to the file once its header was read."""

    def read(path: str | os.PathLike[str]) -> ModelFacts:
        facts = read_facts(path)
        change(facts)
        return facts

    monkeypatch.setattr(tinyserve_gguf.model, "read_facts", read)


def loaded_then(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], None]) -> None:
    """Something happens to the file once llama.cpp is done with it."""

    class Late(NativeModel):
        def __init__(self, path: str, *args: Any, **options: Any) -> None:
            super().__init__(path, *args, **options)
            change(path)

    monkeypatch.setattr(tinyserve_gguf.model, "NativeModel", Late)


def refused(path: Path, cache: str = "25%") -> str:
    """The error of a load; one line that begins with the path."""
    with pytest.raises(ModelFileError) as error:
        load(path, expert_cache=cache, device="CPU", n_ctx=256)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value)


@pytest.fixture
def copied(model_file: ModelFile, tmp_path: Path) -> Path:
    return Path(shutil.copy(model_file("mixtral"), tmp_path / "m.gguf"))


def test_gone_after_its_header_was_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts_then(monkeypatch, lambda _: copied.unlink())
    assert "No such file" in refused(copied)


def test_cut_off_after_its_header_was_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts_then(monkeypatch, lambda facts: os.truncate(copied, facts.file_bytes // 2))
    assert "not within the file bounds" in refused(copied)


@pytest.mark.parametrize("cache", ["25%", "all"])
def test_cut_off_while_it_was_loaded(copied: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """Not the signal that touching its pages would raise."""
    last = max((part.weight for layer in read_facts(copied).expert_layers for part in layer.parts), key=lambda weight: weight.offset)
    loaded_then(monkeypatch, lambda _: os.truncate(copied, last.offset + last.n_bytes - 1))
    assert f"was cut off while it was read, {last.name} ends at byte" in refused(copied, cache)


def test_written_over_while_it_was_loaded(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file under the old name: llama.cpp reads other bytes than the shim, which has opened the old one. Both are whole."""
    weight = read_facts(copied).expert_layers[1].parts[0].weight

    def replace(_: object) -> None:
        data = bytearray(copied.read_bytes())
        data[weight.offset] ^= 1
        copied.unlink()
        copied.write_bytes(data)

    class Early(NativeModel):
        def __init__(self, *args: Any, **options: Any) -> None:
            replace(None)
            super().__init__(*args, **options)

    monkeypatch.setattr(tinyserve_gguf.model, "NativeModel", Early)
    assert f"{weight.name} changed while it was read" in refused(copied)


def test_shards_are_opened_in_order(model_file: ModelFile, tmp_path: Path) -> None:
    """Every weight from its own shard, and the error names the one that is broken."""
    shards = split(Path(shutil.copy(model_file("mixed"), tmp_path / "m.gguf")), 3)
    facts = read_facts(shards[1])
    assert len({part.weight.shard for layer in facts.expert_layers for part in layer.parts}) > 1
    with load(shards[1], expert_cache="25%", device="CPU", n_ctx=256) as model:
        for layer in facts.expert_layers:
            for part in layer.parts:
                weight = part.weight
                raw = facts.shards[weight.shard].read_bytes()[weight.offset : weight.offset + weight.n_bytes]
                experts = [model.experts[layer.block, expert, layer.family].weights[part.role].raw.tobytes() for expert in range(layer.n_expert)]
                assert b"".join(experts) == raw


# ---- progress -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["25%", "all"])
def test_progress_rises_from_0_to_1_and_stops_a_load_anywhere(model_file: ModelFile, cache: str) -> None:
    path, seen = model_file("mixtral"), list[float]()

    def hear(fraction: float) -> bool:
        seen.append(fraction)
        return True

    load(path, expert_cache=cache, device="CPU", n_ctx=256, progress=hear).close()
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 1)
    for fraction in (0.0, 0.2, 0.5, 0.6, 1.0):
        with pytest.raises(EngineError, match=r"^loading was stopped$"):
            load(path, expert_cache=cache, device="CPU", n_ctx=256, progress=lambda now, limit=fraction: now < limit)


def test_an_error_in_the_callback_comes_out(model_file: ModelFile) -> None:
    """Of the second half: llama.cpp's own callback cannot raise."""

    def hear(fraction: float) -> bool:
        if fraction > 0.5:
            raise KeyError("mine")
        return True

    with pytest.raises(KeyError, match="mine"):
        load(model_file("mixtral"), expert_cache="25%", device="CPU", n_ctx=256, progress=hear)
