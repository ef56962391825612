"""One model on several devices, each with its own pools: two proxies over the CPU, layers split between them. The reference is stock llama.cpp."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from exact import THREADS, paged, run, stock
from gguf import GGUFReader
from processes import error_line

from tinyserve_gguf import Model, OptionError, Sampling, load
from tinyserve_gguf._llama import NativeModel, Offload
from tinyserve_gguf._shim import Pager
from tinyserve_gguf.choices import POLICIES
from tinyserve_gguf.cli import main
from tinyserve_gguf.errors import CapacityError, EngineError, ModelFileError
from tinyserve_gguf.group import PagerGroup
from tinyserve_gguf.split import SplitPlan, layer_devices
from tinyserve_gguf.verify import VerifyOptions, verify

ModelFile = Callable[..., Path]

TWO = "CPU,CPU"
SHORT = (1, 7, 40)
STEPS = 16
SPLITS = [None, (3, 2), (1, 4)]


def opened(path: Path, cache: str = "25%", split: tuple[float, ...] | None = None, device: str = TWO, **options: object) -> Model:
    return load(path, expert_cache=cache, device=device, tensor_split=split, n_threads=THREADS, **options)  # type: ignore[arg-type]


def group_of(model: Model) -> PagerGroup:
    assert isinstance(model.experts.pager, PagerGroup)
    return model.experts.pager


# ---- the same logits ----


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek2", "scaled", "nemotron_h_moe", "qwen35moe", "grovemoe", "mixed"])
def test_same_logits(model_file: ModelFile, name: str, split: tuple[float, ...] | None) -> None:
    """A layer's attention, KV cache and experts are on one device; what goes on to the next one crosses once."""
    path = model_file(name, layers=4)
    for cache in ("0.001%", "50%", "all"):
        with opened(path, cache, split) as model:
            assert paged(model, STEPS, (*SHORT, 519)) == stock(path, STEPS, (*SHORT, 519))
            for _, pager in group_of(model).parts():
                stats = pager.stats()
                assert stats.decode.hits + stats.decode.misses == stats.decode.lookups > 0 or stats.slots_total == 0


def test_every_pool_size(model_file: ModelFile) -> None:
    path = model_file("qwen3moe", layers=4)
    for n in range(4, 33):
        with opened(path, str(n), (3, 2)) as model:
            assert model.plan.n_slots == n if n < 32 else model.plan.share == 1
            assert paged(model, 8, (7,)) == stock(path, 8, (7,))


def test_gemma4(model_file: ModelFile) -> None:
    path = model_file("gemma4")
    with opened(path, "25%") as model:
        assert paged(model, STEPS, SHORT) == stock(path, STEPS, SHORT)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_and_misses(model_file: ModelFile, policy: str) -> None:
    path = model_file("gpt-oss", layers=4)
    for miss in ("fetch", "cpu", "split"):
        with opened(path, "50%", (3, 2), policy="lru", miss=miss) as model:
            model.set_policy(policy)
            assert paged(model, STEPS, SHORT) == stock(path, STEPS, SHORT)


def test_three_devices(model_file: ModelFile) -> None:
    path = model_file("gpt-oss", layers=6)
    with opened(path, "25%", device="CPU,CPU,CPU") as model:
        assert [label for label, _ in group_of(model).parts()] == ["CPU 0", "CPU 1", "CPU 2"]
        assert paged(model, STEPS, SHORT) == stock(path, STEPS, SHORT)


# ---- the same split ----


@pytest.mark.parametrize(
    "shares",
    [
        *((1, 1), (1, 2), (1 / 3, 2 / 3), (7, 6), (1, 1, 1), (2, 3, 5), (1e-3, 2e-3, 2e-3), (1, 1, 1, 1)),
        *((0.3, 1), (0.7, 0.6), (0.09, 0.04), (1.2, 1.4)),  # doubles would give another layer
    ],
)
def test_layers_lie_where_llama_cpp_puts_them(model_file: ModelFile, shares: tuple[float, ...]) -> None:
    """Each proxy knows the weights of its own layers alone: a weight that llama.cpp puts elsewhere is one that does not arrive."""
    path = model_file("qwen3moe", layers=12)
    with opened(path, "25%", shares, device=",".join(["CPU"] * len(shares))) as model:
        assert isinstance(model.plan, SplitPlan)
        owners = layer_devices(12, shares)
        assert model.plan.devices == owners
        assert [model.experts[block, 0].device for block in range(12)] == [f"CPU {owners[block]}" for block in range(12)]


def test_another_split_than_planned_is_refused(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file("qwen3moe", layers=4)
    offload = PagerGroup.offload
    for shares in ((2, 3), (4, 1)):

        def otherwise(self: PagerGroup, pattern: str, shares: tuple[float, ...] = shares) -> object:
            self._shares = shares
            return offload(self, pattern)

        monkeypatch.setattr(PagerGroup, "offload", otherwise)
        with pytest.raises(EngineError, match=r"did not put blk\.\d\.ffn_gate_exps\.weight on CPU, where it was planned"):
            opened(path, "25%", (3, 2))


# ---- pipeline parallelism ----


class Props(ctypes.Structure):
    """struct ggml_backend_dev_props"""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("name", "description")),
        *((name, ctypes.c_size_t) for name in ("memory_free", "memory_total")),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        *((name, ctypes.c_bool) for name in ("is_async", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")),
    )


GetProps = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Props))


def pretend(device: int) -> object:
    """Let a proxy device say that it has events, as a GPU's has. Where there are none llama.cpp waits instead. What it returns must live on."""
    functions = (ctypes.c_void_p * 5).from_address(device)  # get_props is the fifth of struct ggml_backend_device_i
    address = functions[4]
    assert address
    original = GetProps(address)

    def get_props(device: int, props: ctypes._Pointer[Props]) -> None:
        original(device, props)
        props.contents.is_async = props.contents.events = True

    callback = GetProps(get_props)
    functions[4] = ctypes.cast(callback, ctypes.c_void_p).value
    return callback


@pytest.mark.parametrize("overrides", [False, True])
def test_pipeline(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overrides: bool) -> None:
    """With several copies of the graph's inputs, which take turns. An override, even one that matches nothing, makes llama.cpp give that up."""
    path = model_file("gpt-oss", layers=4)
    caplog.set_level(logging.INFO, "tinyserve_gguf.llama")
    offload, alive = PagerGroup.offload, []

    def pretending(self: PagerGroup, pattern: str) -> Offload:
        found = offload(self, pattern)
        alive.extend(pretend(device) for device in (found.device, *found.others))
        named = self.parts()[0][1].offload("^nothing$")
        return replace(found, pattern=named.pattern, buffer_type=named.buffer_type) if overrides else found

    monkeypatch.setattr(PagerGroup, "offload", pretending)
    with opened(path, "50%", (2, 3)) as model:
        assert paged(model, STEPS, (*SHORT, 519)) == stock(path, STEPS, (*SHORT, 519))
    assert len(alive) == 2
    assert ("pipeline parallelism enabled" in caplog.text) == (not overrides)


def test_experts_are_mapped_once(model_file: ModelFile) -> None:
    """No address of the host pool is in two devices' hands, and every expert is the file's own bytes, and its slot's."""
    path = model_file("gpt-oss", layers=4)
    with opened(path, "25%", (3, 2)) as model, opened(path, device="CPU") as alone:
        run(model.native, 40, 8)
        file = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
        stretches = []
        for layer in model.facts.expert_layers:
            for number in range(layer.n_expert):
                expert = model.experts[layer.block, number]
                for role, weight in expert.weights.items():
                    raw = weight.raw
                    assert np.array_equal(
                        raw, np.asarray(file[f"blk.{layer.block}.ffn_{role}_exps.weight"][number]).view(np.uint8).reshape(raw.shape)
                    )
                    assert expert.slot is None or np.array_equal(weight.in_slot(), raw)
                    stretches.append((raw.__array_interface__["data"][0], raw.nbytes))
        stretches.sort()
        assert all(start + n <= after for (start, n), (after, _) in itertools.pairwise(stretches))
        pager, single = model.stats().pager, alone.stats().pager
        assert pager
        assert single
        assert (pager.host_bytes, pager.host_tensors) == (single.host_bytes, single.host_tensors)


# ---- several contexts, windows ----


def test_two_threads(model_file: ModelFile) -> None:
    """Sessions that decode at the same time, also while one is on the first device and the other on the second."""
    path = model_file("gpt-oss", layers=4)
    with opened(path, "25%", n_ctx=640) as model:
        found: dict[int, str] = {}

        def work(seed: int) -> None:
            found[seed] = run(model.native, 40, 40, seed=seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        model.check_integrity()
    native = NativeModel(str(path), None, extra_bufts=False)
    try:
        assert found == {seed: run(native, 40, 40, seed=seed) for seed in range(2)}
    finally:
        native.close()


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_windows(model_file: ModelFile, name: str) -> None:
    """Positions move in the caches of both devices. On one device the same is compared with fresh contexts of llama.cpp, in test_window_oracle."""
    path = model_file(name, layers=4)
    replies = []
    for device, split in (("CPU", None), (TWO, None), (TWO, (1, 4))):
        with opened(path, "50%", split, device=device, window=64) as model:
            replies.append(list(model.session().generate(list(range(10, 40)), 150, Sampling(temp=0))))
            assert model.stats().window
    assert len(replies[0]) > 60
    assert replies[0] == replies[1] == replies[2]


# ---- what is done by hand ----


def test_experts_by_hand(model_file: ModelFile) -> None:
    with opened(model_file("qwen3moe", layers=4), "50%", (3, 2)) as model:
        first, last = model.experts[0, 5], model.experts[3, 5]
        assert (first.device, last.device) == ("CPU 0", "CPU 1")
        for expert in (first, last):
            expert.pin()
        slots = {label: pager.stats().slots_used for label, pager in group_of(model).parts()}
        assert slots == {"CPU 0": 1, "CPU 1": 1}
        for _ in range(3):
            run(model.native, 40, 8)
        assert first.resident
        assert last.resident
        last.unpin()
        last.evict()
        assert not last.resident
        last.prefetch()
        assert last.resident
        assert len(model.experts) == 32
        assert sum(state.slot >= 0 for states in model.experts.states().values() for state in states) == model.stats().pager.slots_used  # type: ignore[union-attr]
        with pytest.raises(KeyError, match="no routed experts"):
            model.experts[4, 0]
    with pytest.raises(OptionError, match="closed"):
        _ = first.state


def test_counters(model_file: ModelFile) -> None:
    with opened(model_file("qwen3moe", layers=4), "25%", (2, 3)) as model:
        run(model.native, 40, 8)
        stats = model.stats()
        assert stats.pager
        parts = [part for _, part in stats.parts]
        for phase in ("prefill", "decode"):
            sums = [sum(getattr(getattr(part, phase), name) for part in parts) for name in ("lookups", "hits", "misses", "bytes_link")]
            whole = getattr(stats.pager, phase)
            assert sums == [whole.lookups, whole.hits, whole.misses, whole.bytes_link]
        assert stats.pager.decode.graphs == 8  # a token is one graph, whatever it is cut into
        assert [entry["device"] for entry in stats.as_dict()["devices"]] == ["CPU 0", "CPU 1"]
        assert sum("hit rate" in line and line.startswith("CPU ") for line in stats.lines()) == 2
        found = model.expert_map()
        assert [layer.device for layer in found.layers] == ["CPU 0"] * 2 + ["CPU 1"] * 2
        assert [layer["device"] for layer in found.as_dict()["layers"]] == ["CPU 0"] * 2 + ["CPU 1"] * 2
        assert sum(int(layer.resident.sum()) for layer in found.layers) == found.slots_resident == stats.pager.slots_used
        states = model.experts.states()
        assert [layer.hits.tolist() for layer in found.layers] == [[state.hits for state in states[block, "exps"]] for block in range(4)]
        model.reset_stats()
        assert all(part.decode.lookups == 0 for _, part in model.stats().parts)
    with opened(model_file("qwen3moe", layers=4), device="CPU") as alone:
        assert not alone.stats().parts
        assert "devices" not in alone.stats().as_dict()


def test_layer_times(model_file: ModelFile) -> None:
    with opened(model_file("qwen3moe", layers=4), "25%", (3, 2)) as model:
        model.set_profile(True)
        run(model.native, 1, 8)
        assert [time.block for time in model.layer_times()] == [0, 1, 2, 3, None]
        assert all(time.total > 0 for time in model.layer_times())


def test_resize(model_file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file("qwen3moe", layers=4)
    with opened(path, "25%", (3, 2)) as model:
        for cache in ("50%", "all", "16", "0.001%"):
            done = model.resize(cache)
            assert done.slots == model.stats().pager.slots_total == model.plan.n_slots  # type: ignore[union-attr]
            assert paged(model, 8, (7,)) == stock(path, 8, (7,))
        model.resize("16")
        before = model.plan
        resize = Pager.resize

        def fails_on_the_second(self: Pager, n_slots: list[int]) -> object:
            if self is group_of(model).parts()[1][1]:
                raise CapacityError("no memory today")
            return resize(self, n_slots)

        monkeypatch.setattr(Pager, "resize", fails_on_the_second)
        with pytest.raises(CapacityError, match="today"):
            model.resize("50%")
        monkeypatch.setattr(Pager, "resize", resize)
        assert model.plan is before
        assert model.stats().pager.slots_total == 16  # type: ignore[union-attr]
        assert paged(model, 8, (7,)) == stock(path, 8, (7,))


def test_a_group_does_all_that_a_pager_does() -> None:
    """What is not written anew would ask for the one pager that a group is not."""
    making = {"join", "add_file", "add_pool", "add_layer", "use_cpu", "commit"}  # each is one still
    public = {name for name, _ in inspect.getmembers(Pager) if not name.startswith("_")}
    assert {name for name in public if name not in PagerGroup.__dict__} == making


def test_stopped_while_loading(model_file: ModelFile) -> None:
    path = model_file("qwen3moe", layers=4)
    heard: list[float] = []
    with opened(path, progress=lambda done: heard.append(done) or True):
        assert heard == sorted(heard)
        assert heard[-1] == 1
    for stop in (0.2, 0.6, 0.9):
        with pytest.raises(EngineError, match="stopped"):
            opened(path, progress=lambda done, stop=stop: done < stop)


# ---- the class of llama-cpp-python ----


def test_llama(model_file: ModelFile) -> None:
    from tinyserve_gguf import Llama

    path = str(model_file("qwen3moe", layers=4))
    options = {"n_ctx": 256, "n_threads": 1, "verbose": False, "expert_cache": "25%"}
    replies = []
    for more in ({"device": "CPU"}, {"device": TWO}, {"device": TWO, "tensor_split": [1, 4]}):
        llama = Llama(path, **options, **more)  # type: ignore[arg-type]
        try:
            replies.append(llama("Once upon", max_tokens=24, temperature=0)["choices"][0]["text"])
            assert llama.expert_map().layers[-1].device == ("CPU" if more["device"] == "CPU" else "CPU 1")
        finally:
            llama.close()
    assert replies[0]
    assert replies[0] == replies[1] == replies[2]
    for more, message in (
        ({"device": TWO, "split_mode": 3}, "--split-mode tensor cuts every expert"),
        ({"device": TWO, "split_mode": 2}, "--split-mode row cuts every expert"),
        ({"device": TWO, "split_mode": 0}, "names several"),
        ({"device": "CPU", "tensor_split": [1, 1]}, "--tensor-split is for several devices"),
    ):
        with pytest.raises(OptionError, match=message):
            Llama(path, **options, **more)  # type: ignore[arg-type]


# ---- the command line ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "CPU,GPU7"], "there is no device 'GPU7' here"),
        (["--device", "CPU,CPU", "--tensor-split", "1,2,3"], "gives 3 shares, and there are 2 devices"),
        (["--device", "CPU,CPU", "--tensor-split", "99,1"], "leaves no block for CPU 1"),
        (["--device", "CPU", "--tensor-split", "1,1"], "--tensor-split is for several devices"),
        (
            ["--device", "CPU,CPU", "--split-mode", "tensor"],
            "--split-mode tensor cuts every expert over all devices, and an expert is paged as a whole",
        ),
        (["--device", ",".join(["CPU"] * 5)], "has 4 blocks, too few for 5 devices"),
        (["--device", "CPU,CPU", "--expert-cache", "3"], "one token needs 2 + 2 = 4 experts"),
    ],
)
def test_what_cannot_be(model_file: ModelFile, options: list[str], message: str) -> None:
    line = error_line(CliRunner().invoke(main, ["chat", str(model_file("qwen3moe", layers=4)), "-p", "hi", *options]))
    assert message in line


@pytest.mark.parametrize(
    "options", [["--device", "CPU,"], ["--device", "auto,CPU"], ["--device", "a b"], ["--tensor-split", "1,x"], ["--tensor-split", "1,0"]]
)
def test_what_is_not_even_read(model_file: ModelFile, options: list[str]) -> None:
    done = CliRunner().invoke(main, ["chat", str(model_file("qwen3moe", layers=4)), "-p", "hi", *options])
    assert done.exit_code == 2
    assert options[0] in done.stderr


def test_dense_models_have_nothing_to_split(tmp_path: Path, model_file: ModelFile) -> None:
    from reshaped import dense

    path = dense(model_file("mixtral"), tmp_path / "dense.gguf")
    with pytest.raises(OptionError, match="nothing to split over the CPU"):
        load(path, device=TWO)


def test_verify_and_its_report(model_file: ModelFile) -> None:
    path = model_file("mixed", layers=4)
    report = verify(VerifyOptions(str(path), device=TWO, quick=True, n_threads=1, tensor_split=(1, 1)), lambda _text, _done: None)
    assert report.holds
    assert report.device == TWO
    assert {row.type.split(" on ")[1] for row in report.kernels} == {"CPU 0", "CPU 1"}
    assert sum(row.n_tensors for row in report.kernels) > 0


def test_bench_says_what_each_device_does(model_file: ModelFile) -> None:
    path = str(model_file("qwen3moe", layers=4))
    arguments = [
        "bench",
        path,
        "--device",
        TWO,
        "--tensor-split",
        "3,2",
        "-p",
        "8",
        "-n",
        "4",
        "--warmup",
        "2",
        "-r",
        "1",
        "--expert-cache",
        "25%",
        "--json",
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["setup"]["device"] == TWO
    assert [note.split(": ")[1] for note in found["notes"] if "slots in use" in note] == ["CPU 0", "CPU 1"]
    assert all(row["hit_rate"] is not None for row in found["rows"] if row["test"].startswith("tg"))


def test_a_broken_file(tmp_path: Path, model_file: ModelFile) -> None:
    path = tmp_path / "short.gguf"
    data = model_file("qwen3moe", layers=4).read_bytes()
    path.write_bytes(data[: len(data) - 1000])
    with pytest.raises(ModelFileError):
        opened(path)
