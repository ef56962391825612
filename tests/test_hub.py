"""Models by name: what a name stands for, which files of a repository belong to it, caches, and downloads from a hub on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serving
from processes import cli, refused
from synthetic import split

from tinyserve_gguf import catalog, hub
from tinyserve_gguf.catalog import KnownModel, catalogue, check_geometry, find
from tinyserve_gguf.errors import ModelFileError, OptionError
from tinyserve_gguf.facts import read_facts
from tinyserve_gguf.hub import Hub, Wanted, choose
from tinyserve_gguf.resolve import Reference, resolve

ModelFile = Callable[..., Path]


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(hub, "PAUSE", 0.0)


def ignored(_text: str) -> None:
    """What is said along the way."""


# ---- names of files -------------------------------------------------------------------------------------------------------------------------

NAMES = [
    "README.md",
    "mmproj-model-Q4_K_M.gguf",
    "imatrix-Q4_K_M.gguf",
    "model-UD-Q4_K_M.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "Q8_0/model-Q8_0-00001-of-00002.gguf",
    "Q8_0/model-Q8_0-00002-of-00002.gguf",
    "BF16/model-BF16-00001-of-00003.gguf",
    "BF16/model-BF16-00003-of-00003.gguf",
]


@pytest.mark.parametrize(
    ("quant", "chosen"),
    [
        (None, ["model-Q4_K_M.gguf"]),
        ("q4_k_m", ["model-Q4_K_M.gguf"]),
        ("UD-Q4_K_M", ["model-UD-Q4_K_M.gguf"]),
        ("Q4_K", []),  # no prefix of another quant
        ("Q8_0", ["Q8_0/model-Q8_0-00001-of-00002.gguf", "Q8_0/model-Q8_0-00002-of-00002.gguf"]),
        ("BF16", []),  # a shard is missing
    ],
)
def test_files_of_a_quant(quant: str | None, chosen: list[str]) -> None:
    assert choose(NAMES, Wanted("o/n", quant)) == chosen
    assert choose(reversed(NAMES), Wanted("o/n", quant)) == chosen


def test_without_a_quant_any_model_will_do() -> None:
    assert choose(["a-MXFP4.gguf", "b.txt"], Wanted("o/n")) == ["a-MXFP4.gguf"]
    assert choose(["b.txt"], Wanted("o/n")) == []


def test_patterns_of_the_catalogue() -> None:
    assert choose(["gpt-oss-20b-MXFP4.gguf"], Wanted("o/n", "MXFP4", "*mxfp4*.gguf")) == ["gpt-oss-20b-MXFP4.gguf"]
    assert choose(["Q2/x.gguf", "Q4/y.gguf"], Wanted("o/n", None, "q4/*.gguf")) == ["Q4/y.gguf"]


@pytest.mark.parametrize("text", ["", "name", "a/b/c", "a/b:", "a/b:c d", "a b/c", "https://x/y"])
def test_what_is_no_repository(text: str) -> None:
    with pytest.raises(OptionError, match="OWNER/NAME"):
        Wanted.parse(text)


# ---- names of models ------------------------------------------------------------------------------------------------------------------------


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = Reference.parse("GPT-oss-20b")
    assert found.wanted == Wanted("ggml-org/gpt-oss-20b-GGUF", "MXFP4", "*mxfp4*.gguf")
    (tmp_path / "GPT-oss-20b").touch()
    assert Reference.parse("GPT-oss-20b").wanted is None


def test_quants_of_a_name() -> None:
    assert Reference.parse("qwen3-30b-a3b:ud-q4_k_xl").wanted == Wanted("unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF", "UD-Q4_K_XL", "*UD-Q4_K_XL*.gguf")
    with pytest.raises(OptionError, match=r"known as Q4_K_M, .* -hf unsloth/.*:Q9"):
        Reference.parse("qwen3-30b-a3b:Q9")


def test_a_slip_is_told_from_a_path() -> None:
    with pytest.raises(ModelFileError, match="did you mean gpt-oss-20b"):
        Reference.parse("gpt-oss20b")
    for name in ("gpt-oss20b.gguf", "./gpt-oss20b", "nothing-like-it", "x" * 5000):
        assert Reference.parse(name).wanted is None


def test_a_repository_of_the_catalogue_is_known_by_it() -> None:
    model = Reference.parse("ggml-org/gpt-oss-20b-GGUF:Q8_0", is_repository=True).model
    assert model is not None
    assert model.alias == "gpt-oss-20b"
    assert Reference.parse("some/one", is_repository=True).model is None


# ---- the catalogue --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", catalogue().values(), ids=lambda model: model.alias)
def test_numbers_of_an_entry_agree(model: KnownModel) -> None:
    """Experts are most of a mixture's weights, and sizes are those of a quantisation."""
    known = model.geometry
    assert 0.85 < known.expert_weights / known.weights < 0.99
    assert known.other_weights > 0
    assert known.used < known.experts
    assert known.moe_blocks <= known.blocks
    assert (model.context or 0) <= model.trained
    for quant, size in model.bytes.items():
        assert 2 < 8 * size / known.weights < 6, quant
        facts = model.facts(quant)
        assert facts is not None
        assert facts.file_bytes == pytest.approx(size, rel=0.001)
        assert facts.n_expert == known.experts
    for quant, pattern in model.quants.items():
        names = [f"{quant}/m-{quant}-00001-of-00001.gguf", f"m-{quant}.gguf", f"m.{quant}.gguf"]  # the ways that repositories write it
        assert choose(names, Wanted(model.repository, quant, pattern)), quant


WINDOWS = {"gpt-oss": "stay", "qwen35moe": "stay", "granitemoe": "stay", "phimoe": "stay"}  # YaRN, M-RoPE, unchecked, LongRoPE; see kv


@pytest.mark.parametrize("model", catalogue().values(), ids=lambda model: model.alias)
def test_windows_are_those_of_the_architecture(model: KnownModel) -> None:
    if model.window:
        assert model.window == WINDOWS.get(model.geometry.architecture, "shift")


def known_as(path: Path, **changes: object) -> KnownModel:
    """An entry for a synthetic file."""
    facts = read_facts(path)
    example = find("olmoe-1b-7b")
    assert example is not None
    geometry = dataclasses.replace(
        example.geometry,
        architecture=facts.architecture,
        blocks=facts.n_blocks - facts.n_idle_blocks,
        moe_blocks=len({layer.block for layer in facts.expert_layers}),
        experts=facts.n_expert,
        used=facts.n_used,
        embedding=facts.embedding_length,
        expert_ff=facts.expert_layers[0].parts[0].weight.ne(1),
    )
    return dataclasses.replace(
        example, alias="tiny", title="Tiny", repository="o/tiny", quants={"F32": "*F32*.gguf"}, geometry=dataclasses.replace(geometry, **changes)
    )


@pytest.fixture
def tiny(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[KnownModel]:
    """A synthetic model in the place of all known ones."""
    model = known_as(model_file("qwen3moe"))
    monkeypatch.setattr("tinyserve_gguf.resolve.find", lambda name: model if name == "tiny" else None)
    yield model


@pytest.mark.parametrize("field", ["blocks", "moe_blocks", "experts", "used", "embedding", "expert_ff"])
def test_another_geometry_is_another_model(model_file: ModelFile, field: str) -> None:
    path = model_file("qwen3moe")
    facts = read_facts(path)
    right = known_as(path)
    check_geometry(facts, right)
    wrong = known_as(path, **{field: getattr(right.geometry, field) + 1})
    with pytest.raises(ModelFileError, match=f"is not Tiny: {field.replace('_', ' ')} "):
        check_geometry(facts, wrong)


def test_a_damaged_catalogue_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.toml").write_text('[x]\ntitle = "X"\n')
    monkeypatch.setattr(catalog, "PLACES", (tmp_path / "models.toml",))
    with pytest.raises(ModelFileError, match="install the package again"):
        catalogue.__wrapped__()


# ---- caches ---------------------------------------------------------------------------------------------------------------------------------


def test_the_cache_of_llama_cpp(tmp_path: Path) -> None:
    folder = tmp_path / "xdg" / "llama.cpp"
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / f"o_n_{name.replace('/', '_')}").touch()
    (folder / "o_n_model-Q2_K.gguf.downloadInProgress").touch()
    assert Hub().cached(Wanted("o/n", "Q4_K_M")) == folder / "o_n_model-Q4_K_M.gguf"
    assert Hub().cached(Wanted("o/n", "Q8_0")) == folder / "o_n_Q8_0_model-Q8_0-00001-of-00002.gguf"
    assert Hub().cached(Wanted("o/n", "BF16")) is None
    assert Hub().cached(Wanted("o/n", "Q2_K")) is None
    assert Hub().cached(Wanted("o/m", "Q8_0")) is None


# ---- downloads ------------------------------------------------------------------------------------------------------------------------------


def test_a_download_is_in_the_cache_afterwards(tiny: KnownModel, model_file: ModelFile, tmp_path: Path) -> None:
    data = model_file("qwen3moe").read_bytes()
    said: list[str] = []
    with serving(FakeHub({"o/tiny": {"tiny-F32.gguf": data, "README.md": b"x"}})) as here:
        local = Hub(here.endpoint, tmp_path / "cache")
        path = Path(resolve(Reference.parse("tiny"), local, said.append))
        assert path.read_bytes() == data
        assert path.name == "tiny-F32.gguf"
        assert here.downloads() == [("tiny-F32.gguf", None)]
        assert Path(resolve(Reference.parse("tiny"), local, said.append)) == path
        assert len(here.downloads()) == 1
    assert said == ["downloading o/tiny: tiny-F32.gguf"]
    assert tiny.geometry.experts == read_facts(path).n_expert


def test_all_shards_come_and_the_first_is_the_model(model_file: ModelFile, tmp_path: Path) -> None:
    whole = tmp_path / "m-F32.gguf"
    whole.write_bytes(model_file("qwen3moe").read_bytes())
    shards = {f"F32/{path.name}": path.read_bytes() for path in split(whole, 3)}
    with serving(FakeHub({"o/n": shards})) as here:
        path = Hub(here.endpoint, tmp_path / "cache").download(Wanted("o/n", "F32"), ignored)
        assert re.search(r"-00001-of-00003\.gguf$", path.name)
        assert len(here.downloads()) == 3
    facts = read_facts(path)
    assert len(facts.shards) == 3
    assert Hub(cache=tmp_path / "cache").cached(Wanted("o/n", "F32")) == path


def test_a_broken_connection_goes_on_where_it_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    data = os.urandom(100_000)
    said: list[str] = []
    with serving(FakeHub({"o/n": {"a-Q4_K_M.gguf": data}}, break_at=40_000)) as here:
        path = Hub(here.endpoint, tmp_path).download(Wanted("o/n"), said.append)
        assert path.read_bytes() == data
        (_, first), (_, second) = here.downloads()
    assert first is None
    start = int(re.fullmatch(r"bytes=(\d+)-.*", second or "")[1])  # type: ignore[index]
    assert 30_000 < start <= 40_000
    assert "going on" in said[1]


def test_so_does_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(hub, "TRIES", 1)
    data = os.urandom(100_000)
    with serving(FakeHub({"o/n": {"a-Q4_K_M.gguf": data}}, break_at=70_000)) as here:
        local = Hub(here.endpoint, tmp_path)
        with pytest.raises(ModelFileError, match=r"hf download o/n --include '\*Q4_K_M\*\.gguf'"):
            local.download(Wanted("o/n"), ignored)
        assert local.cached(Wanted("o/n")) is None
        assert local.download(Wanted("o/n"), ignored).read_bytes() == data
        assert re.fullmatch(r"bytes=[67]\d{4}-.*", here.downloads()[-1][1] or "")


def test_a_file_that_is_another_model_is_refused(tiny: KnownModel, model_file: ModelFile, tmp_path: Path) -> None:
    other = FakeHub({tiny.repository: {"x-F32.gguf": model_file("gpt-oss").read_bytes()}})
    with serving(other), pytest.raises(ModelFileError, match="is not Tiny: architecture gpt-oss, not qwen3moe"):
        resolve(Reference.parse("tiny"), Hub(other.endpoint, tmp_path), ignored)


def test_what_the_hub_does_not_have(tmp_path: Path) -> None:
    with serving(FakeHub({"o/n": {"a-Q8_0.gguf": b"x"}})) as here:
        with pytest.raises(ModelFileError, match=r"no whole model Q4_0: it has a-Q8_0\.gguf"):
            Hub(here.endpoint, tmp_path).download(Wanted("o/n", "Q4_0"), ignored)
        with pytest.raises(ModelFileError, match="no public repository o/m"):
            Hub(here.endpoint, tmp_path).download(Wanted("o/m"), ignored)


def test_offline_the_command_is_named(tmp_path: Path) -> None:
    with serving(FakeHub({})) as here:
        pass
    with pytest.raises(ModelFileError, match=r"where there is a network: hf download o/n --include '\*Q5_0\*\.gguf'"):
        Hub(here.endpoint, tmp_path).download(Wanted("o/n", "Q5_0"), ignored)


def test_without_the_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_installed", lambda: False)
    assert Hub().cached(Wanted("o/n")) is None
    with pytest.raises(ModelFileError, match=r"pip install 'tinyserve-gguf\[hub\]'; or by hand: hf download o/n"):
        Hub().download(Wanted("o/n"), ignored)


# ---- the command line -----------------------------------------------------------------------------------------------------------------------


def test_info_of_a_repository(model_file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process, which finds the hub as huggingface_hub does."""
    with serving(FakeHub({"o/n": {"m-Q8_0.gguf": model_file("qwen3moe").read_bytes()}})) as here:
        monkeypatch.setenv("HF_ENDPOINT", here.endpoint)
        done = cli("info", "-hf", "o/n:Q8_0", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "qwen3moe" in done.stdout
        assert "downloading o/n: m-Q8_0.gguf\nmodel: " in done.stderr


def test_one_model_please(tmp_path: Path) -> None:
    assert "two models" in refused(cli("chat", "x.gguf", "-hf", "o/n", cwd=tmp_path))
    assert "there is no MODEL" in refused(cli("bench", cwd=tmp_path))
    assert "did you mean gpt-oss-20b" in refused(cli("info", "gpt-os-20b", cwd=tmp_path))


def test_models_lists_all_of_them(tmp_path: Path) -> None:
    done = cli("models", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for alias in catalogue():
        assert re.search(rf"^{re.escape(alias)} .* (yes: ~\d|no: |the size of its files is not known)", done.stdout, re.MULTILINE)
    rows = json.loads(cli("models", "oss-20b", "--json", cwd=tmp_path).stdout)["models"]
    assert [row["name"] for row in rows] == ["gpt-oss-20b"]
    assert rows[0]["estimate"].startswith("yes: " if rows[0]["fits"] else "no: ")
    assert "no known model" in refused(cli("models", "nothing", cwd=tmp_path))
