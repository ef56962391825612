"""LoRA adapters by `--lora` and `load`: llama.cpp's logits, every byte planned, and files that are none refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import exact
import pytest
from click.testing import CliRunner
from processes import cli, error_line
from test_pitfalls import adapted, write_adapter

from tinyserve_gguf import Llama, ModelFileError, OptionError, load
from tinyserve_gguf._llama import NativeModel
from tinyserve_gguf.cli import main
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.lora import read_adapters
from tinyserve_gguf.placement import plan_for

ModelFile = Callable[..., Path]
ATTENTION, EXPERTS = ("attn_q.weight", "attn_output.weight"), ("exps.weight",)


def stock_logits(path: Path, files: Sequence[tuple[Path, float]], monkeypatch: pytest.MonkeyPatch) -> str:
    """Hash of llama.cpp's own logits, with adapters set by hand in every context."""
    native = NativeModel(str(path), None, extra_bufts=False)
    found = adapted(native, files, monkeypatch)
    native.close()
    return found


@pytest.fixture
def two(model_file: ModelFile, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model, an adapter for its attention, and one for its experts."""
    path = model_file("gpt-oss")
    return path, write_adapter(tmp_path / "attention.gguf", path, ATTENTION), write_adapter(tmp_path / "experts.gguf", path, EXPERTS)


@pytest.mark.parametrize("device", ["CPU", "CPU,CPU"])
@pytest.mark.parametrize("cache", ["25%", "all"])
def test_logits_are_those_of_llama_cpp(two: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch, cache: str, device: str) -> None:
    path, attention, experts = two
    seen = set()
    for lora, scaled in (((), ()), ((experts,), ()), ((), ((experts, 0.5),)), ((attention,), ((experts, -0.25),))):
        with load(path, expert_cache=cache, device=device, n_threads=1, lora=lora, lora_scaled=scaled) as model:
            found = exact.run(model.native, 40, 8)
            assert exact.run(model.native, 40, 8) == found  # every context has them
            model.check_integrity()
        assert found == stock_logits(path, [*((file, 1.0) for file in lora), *scaled], monkeypatch)
        seen.add(found)
    assert len(seen) == 4


@pytest.mark.parametrize("device", ["CPU", "CPU,CPU"])
def test_every_byte_is_planned(two: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture, device: str) -> None:
    """As llama.cpp says when it has loaded them. Llama plans them too."""
    path, *files = two
    options = {"expert_cache": "25%", "device": device, "n_ctx": 256}
    with load(path, **options) as model:
        plain = model.plan.needs.weights
    adapters = read_adapters(read_facts(path), files)
    with caplog.at_level(logging.INFO, "tinyserve_gguf.llama"), load(path, lora=files, **options) as model:
        weights = model.plan.needs.weights
        assert [line for line in model.lines() if line.startswith("adapter: ")] == [f"adapter: {adapter}" for adapter in adapters]
    held = [float(mib) for mib in re.findall(r"LoRA buffer size = *([\d.]+) MiB", caplog.text)]
    total = sum(sum(adapter.sizes.values()) for adapter in adapters)
    assert weights - plain == total
    assert total / (1 << 20) == pytest.approx(sum(held), abs=0.01 * len(held))
    estimated, _ = plan_for(read_facts(path), device=device, expert_cache="25%")
    with closing(Llama(str(path), lora_path=str(files[0]), verbose=False, **options)) as llama:
        assert llama.plan.needs.weights - estimated.needs.weights == sum(adapters[0].sizes.values())


def test_commands(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """One answer with adapters: the options may be repeated, and may name several files, as llama.cpp has them."""
    path, attention, experts = two
    ask = ("chat", path, "-p", "Hello", "-n", "12", "--temp", "0", "--expert-cache", "25%", "--device", "CPU", "-t", "1")
    given = [(), ("--lora", f"{attention},{experts}"), ("--lora", attention, "--lora-scaled", f"{experts}:1"), ("--lora-scaled", f"{experts}:-2.5")]
    said = [cli(*ask, *options, cwd=tmp_path) for options in given]
    assert [done.returncode for done in said] == [0] * 4
    plain, both, again, scaled = (done.stdout for done in said)
    assert both == again
    assert len({plain, both, scaled}) == 3
    assert f"adapter: {experts}, scale -2.5, " in said[3].stderr


@pytest.mark.parametrize("names", [ATTENTION, EXPERTS], ids=["attention", "experts"])
def test_it_is_told_once_if_the_cpu_cannot_compute_misses(model_file: ModelFile, tmp_path: Path, names: tuple[str, ...]) -> None:
    """What an adapter adds within the experts the CPU does not compute, which is known with the first token that misses."""
    path = model_file("qwen3moe")
    options = ("--lora", write_adapter(tmp_path / "lora.gguf", path, names), "--miss", "cpu", "--expert-cache", "25%", "--device", "CPU", "-t", "1")
    done = cli("chat", path, "-n", "12", "--temp", "0", *options, stdin="Hello\nAgain\n/stats\n", cwd=tmp_path)
    assert done.returncode == 0
    told = re.findall(r"^misses:? fetched: .* cannot be computed row by row$", done.stderr, re.MULTILINE)
    assert [line.partition(" ")[0] for line in told] == (["misses:", "misses"] if names is EXPERTS else [])  # a note, and a line of /stats
    assert "misses: computed by the CPU" in done.stderr  # before


def refused(*arguments: str | Path) -> str:
    return error_line(CliRunner().invoke(main, ["chat", *map(str, arguments), "-p", "hi", "--device", "CPU"], prog_name="tinyserve-gguf"))


def test_what_is_no_adapter_of_this_model(model_file: ModelFile, two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path, attention, _ = two
    assert "no such file" in refused(path, "--lora", tmp_path / "missing.gguf")
    assert "is no LoRA adapter" in refused(path, "--lora", path)
    assert "is an adapter and no model: give it to --lora" in refused(attention)
    assert "is an adapter for gpt-oss, and " in refused(model_file("mixtral"), "--lora", attention)
    other = write_adapter(tmp_path / "other.gguf", model_file("gpt-oss", layers=5), ATTENTION)
    assert "changes blk.3.attn_output.weight, which " in refused(path, "--lora", other)
    wider = write_adapter(tmp_path / "wider.gguf", model_file("gpt-oss", embd=128), ATTENTION)
    assert "incorrect shape" in refused(path, "--lora", wider)  # llama.cpp's own words
    for value in ("", "a.gguf,", ",a.gguf"):
        assert "names no file" in refused(path, "--lora", value)
    for value in (str(attention), f"{attention}:", f"{attention}:half"):
        assert "is not FILE:SCALE" in refused(path, "--lora-scaled", value)
    for scale in ("0", "nan", "inf"):
        assert "is a number other than 0" in refused(path, "--lora-scaled", f"{attention}:{scale}")


def test_serving_takes_one(two: tuple[Path, Path, Path]) -> None:
    from tinyserve_gguf.serve import open_llama

    path, attention, experts = two
    with pytest.raises(OptionError, match="takes one LoRA adapter, not 2"):
        open_llama(str(path), device="CPU", lora=(str(attention),), lora_scaled=((str(experts), 0.5),))
    llama, lines = open_llama(str(path), device="CPU", n_ctx=256, n_threads=1, lora_scaled=((str(experts), 0.5),))
    with closing(llama):
        assert (llama.lora_path, llama.lora_scale) == (str(experts), 0.5)
        assert any(line.startswith(f"adapter: {experts}, scale 0.5") for line in lines)


def test_nothing_is_left_behind(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """A refused adapter closes the model that was open for it."""
    path, attention, _ = two
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(attention.read_bytes().replace(b".lora_b", b".lora_c"))
    with pytest.raises(ModelFileError, match=r"broken\.gguf: "):
        load(path, device="CPU", n_ctx=256, lora=[broken])
    with load(path, device="CPU", n_ctx=256, lora=[attention]) as model:
        assert list(model.generate("Hello", max_tokens=2))
