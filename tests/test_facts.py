"""read_facts: what it says of good files, and the one error it raises for every kind of bad one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from gguf import GGUFReader
from gguf_files import EMBED, FF, I32, U16, U32, Tensor, Typed, Value, experts, fused, keys, rest, write_gguf, write_shards

from tinyserve_gguf.errors import ModelFileError
from tinyserve_gguf.facts import read_facts

Q8_EXPERT = 3 * EMBED * FF // 32 * 34  # bytes of gate, up and down of one expert in Q8_0


def write(folder: Path, tensors: list[Tensor], *, arch: str = "qwen3moe", metadata: dict[str, Value] | None = None) -> Path:
    return write_gguf(folder / "m.gguf", arch, keys() if metadata is None else metadata, tensors)


def refusal(path: str | Path) -> str:
    """The message, which is one line and begins with the name of a file in the same folder."""
    with pytest.raises(ModelFileError) as caught:
        read_facts(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(Path(path).parent))
    return message


# ---- good files -----------------------------------------------------------------------------------------------------------------------------


def test_moe(tmp_path: Path) -> None:
    path = write(tmp_path, rest(shared=True) + experts(0) + experts(1))
    facts = read_facts(str(path))
    assert (facts.path, facts.shards, facts.architecture, facts.name) == (path, (path,), "qwen3moe", "Tiny")
    assert (facts.n_blocks, facts.n_idle_blocks, facts.n_expert, facts.n_used) == (2, 0, 4, 2)
    assert (facts.context_length, facts.embedding_length, facts.is_moe, facts.idle_layers) == (256, EMBED, True, ())
    assert [(layer.block, layer.family, layer.n_expert, layer.n_used) for layer in facts.expert_layers] == [(0, "exps", 4, 2), (1, "exps", 4, 2)]
    assert [part.role for part in facts.expert_layers[0].parts] == ["gate", "up", "down"]
    assert facts.expert_layers[0].bytes_per_expert == Q8_EXPERT
    assert [(group.layers, group.bytes_per_expert, group.n_experts) for group in facts.groups] == [(facts.expert_layers, Q8_EXPERT, 8)]
    assert facts.expert_bytes == 8 * Q8_EXPERT
    assert facts.shared_expert_bytes == 2 * Q8_EXPERT // 3
    assert facts.file_bytes == path.stat().st_size
    embedding, output, small = EMBED * 100 * 2, EMBED * 100 // 32 * 34, 2 * (EMBED + EMBED * 4) * 4
    assert facts.resident_bytes == embedding + output + small + facts.shared_expert_bytes
    assert facts.input_bytes == embedding
    assert facts.device_bytes == output + small + facts.shared_expert_bytes
    assert facts.types == {"Q8_0": facts.expert_bytes + facts.shared_expert_bytes + output, "F16": embedding, "F32": small}


def test_tensors_agree_with_the_gguf_package(tmp_path: Path) -> None:
    path = write(tmp_path, rest() + experts(0, down="MXFP4", bias=True, scale=True) + fused(1))
    theirs = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    ours = read_facts(path).tensors
    assert len(ours) == len(theirs)
    for tensor in ours:
        other = theirs[tensor.name]
        assert tensor.shape == tuple(other.shape)
        assert (tensor.type, tensor.type_id) == (other.tensor_type.name, other.tensor_type.value)
        assert (tensor.n_bytes, tensor.offset, tensor.shard) == (other.n_bytes, other.data_offset, 0)


def test_tied_output_is_counted_on_the_device(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path, rest(output=False) + experts(0) + experts(1)))
    assert facts.device_bytes == facts.resident_bytes


def test_bias_and_scale_are_part_of_the_expert(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path, rest() + experts(0, bias=True) + experts(1, scale=True)))
    first, second = facts.expert_layers
    assert all(part.bias and not part.scale for part in first.parts)
    assert all(part.scale and not part.bias for part in second.parts)
    assert first.bytes_per_expert == Q8_EXPERT + (2 * FF + EMBED) * 4
    assert second.bytes_per_expert == Q8_EXPERT + 3 * 4
    assert facts.expert_bytes == 4 * (first.bytes_per_expert + second.bytes_per_expert)
    assert len(facts.groups) == 2


def test_layers_of_one_layout_share_a_group(tmp_path: Path) -> None:
    tensors = rest(5) + experts(0) + experts(1, down="Q4_0") + experts(2) + fused(3) + experts(4, down="Q4_0")
    groups = read_facts(write(tmp_path, tensors, metadata=keys(5))).groups
    assert [[layer.block for layer in group.layers] for group in groups] == [[0, 2], [1, 4], [3]]
    assert [part.role for part in groups[2].layers[0].parts] == ["gate_up", "down"]


def test_no_gate(tmp_path: Path) -> None:
    tensors = rest() + [tensor for block in (0, 1) for tensor in experts(block) if "gate" not in tensor.name]
    assert [part.role for part in read_facts(write(tmp_path, tensors)).expert_layers[0].parts] == ["up", "down"]


def test_dense(tmp_path: Path) -> None:
    tensors = [*rest(), Tensor("blk.0.ffn_up.weight", (EMBED, FF)), Tensor("blk.0.ssm_conv.weight", (4, 1, 8)), Tensor("lm.head", (4, 5, 6))]
    facts = read_facts(write(tmp_path, tensors, arch="qwen3", metadata={"block_count": 2, "context_length": 8, "embedding_length": EMBED}))
    assert (facts.is_moe, facts.n_expert, facts.n_used, facts.groups, facts.expert_bytes) == (False, 0, 0, (), 0)
    assert facts.name == "m"


@pytest.mark.parametrize("name", ["ffn_gate_exps.weights", "ffn_norm_exps.weight", "ffn_up_shexp.weight", "ffn_exps.weight", "ffn_up_exps.lora_a"])
def test_other_three_dimensional_tensors_are_not_experts(tmp_path: Path, name: str) -> None:
    facts = read_facts(write(tmp_path, [*rest(), *experts(0), Tensor(f"blk.1.{name}", (EMBED, FF, 4))]))
    assert [layer.block for layer in facts.expert_layers] == [0]


def test_one_expert(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path, rest() + experts(0, n=1, bias=True) + experts(1, n=1), metadata=keys(n_expert=1, n_used=1)))
    assert [(layer.n_expert, layer.n_used) for layer in facts.expert_layers] == [(1, 1), (1, 1)]


def test_grovemoe_chunk_experts_are_layers_of_their_own(tmp_path: Path) -> None:
    chunk = [Tensor(tensor.name.replace("exps", "chexps"), tensor.shape, tensor.type) for tensor in experts(0, n=2)]
    tensors = rest(1) + experts(0, n=8) + chunk
    facts = read_facts(write(tmp_path, tensors, arch="grovemoe", metadata=keys(1, 8, 3, experts_per_group=4)))
    assert [(layer.family, layer.n_expert, layer.n_used) for layer in facts.expert_layers] == [("exps", 8, 3), ("chexps", 2, 2)]


def test_top_k_per_block(tmp_path: Path) -> None:
    tensors = rest(3) + experts(0) + experts(2)
    facts = read_facts(write(tmp_path, tensors, arch="nemotron_h_moe", metadata=keys(3, 4, [3, 0, 2])))
    assert [layer.n_used for layer in facts.expert_layers] == [3, 2]
    assert facts.n_used == 3


def test_a_list_of_equal_top_k_is_one_number(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path, rest() + experts(0), metadata=keys(2, 4, [2, 0])))
    assert [layer.n_used for layer in facts.expert_layers] == [2]


def test_mtp_blocks_are_idle(tmp_path: Path) -> None:
    tensors = rest(3) + experts(0) + experts(1) + experts(2)
    facts = read_facts(write(tmp_path, tensors, arch="glm4moe", metadata=keys(3, nextn_predict_layers=1)))
    assert ([layer.block for layer in facts.expert_layers], [layer.block for layer in facts.idle_layers]) == ([0, 1], [2])
    assert facts.idle_bytes == facts.idle_layers[0].n_bytes + (EMBED + EMBED * 4) * 4
    assert facts.expert_bytes + facts.resident_bytes + facts.idle_bytes == sum(tensor.n_bytes for tensor in facts.tensors)
    assert facts.groups[0].n_experts == 8


@pytest.mark.parametrize("shipped", [True, False])
def test_deepseek4_computes_its_last_block_when_no_mtp_came_with_it(tmp_path: Path, shipped: bool) -> None:
    probe = [Tensor("blk.1.nextn.eh_proj.weight", (EMBED, EMBED))] if shipped else []
    facts = read_facts(write(tmp_path, rest() + experts(0) + experts(1) + probe, arch="deepseek4", metadata=keys(nextn_predict_layers=1)))
    assert (len(facts.expert_layers), facts.n_idle_blocks) == ((1, 1) if shipped else (2, 0))


def test_hunyuan_with_one_expert_is_dense(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path, rest(), arch="hunyuan-dense", metadata=keys(n_expert=1, n_used=0)))
    assert (facts.is_moe, facts.n_expert) == (False, 0)


def test_a_large_vocabulary_stays_in_c(tmp_path: Path) -> None:
    words: dict[str, Value] = {"tokenizer.ggml.tokens": [f"word {i}" for i in range(5000)], "tokenizer.ggml.token_type": [1] * 5000}
    assert read_facts(write(tmp_path, rest() + experts(0) + experts(1), metadata={**keys(), **words})).n_blocks == 2


# ---- split models ---------------------------------------------------------------------------------------------------------------------------


def three_shards(folder: Path, prefix: str = "m", extra: dict[str, Value] | None = None) -> list[Path]:
    first, *others = experts(0, bias=True)
    return write_shards(folder, prefix, [[*rest(), first], others, experts(1)], extra=extra)


@pytest.mark.parametrize("prefix", ["m", "My Model (Q8)", "UPPER-00001-of-00009"])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_gives_the_whole_model(tmp_path: Path, prefix: str, given: int) -> None:
    paths = three_shards(tmp_path / "Some Folder", prefix)
    facts = read_facts(paths[given])
    assert (facts.path, facts.shards) == (paths[0], tuple(paths))
    assert facts.file_bytes == sum(path.stat().st_size for path in paths)
    gate = facts.expert_layers[0].parts[0]
    assert gate.bias is not None
    assert (gate.weight.shard, gate.bias.shard, facts.expert_layers[1].parts[0].weight.shard) == (0, 1, 2)
    assert gate.bias.offset + gate.bias.n_bytes <= paths[1].stat().st_size


def test_one_of_one(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, "m", [rest() + experts(0) + experts(1)])
    assert read_facts(path).shards == (path,)
    assert read_facts(path.rename(tmp_path / "renamed.gguf")).is_moe


def test_links_are_not_followed_to_find_shards(tmp_path: Path) -> None:
    for i, path in enumerate(three_shards(tmp_path / "snapshot")):
        (tmp_path / "blobs").mkdir(exist_ok=True)
        path.rename(tmp_path / "blobs" / str(i))
        path.symlink_to(tmp_path / "blobs" / str(i))
    assert len(read_facts(tmp_path / "snapshot" / "m-00002-of-00003.gguf").shards) == 3


@pytest.mark.parametrize("gone", [0, 1])
def test_missing_shard(tmp_path: Path, gone: int) -> None:
    paths = three_shards(tmp_path)
    paths[gone].unlink()
    assert f"is one of 3 shards, and {paths[gone].name} is missing; put all shards into one folder" in refusal(paths[2])


@pytest.mark.parametrize("name", ["renamed.gguf", "m-00002-of-00004.gguf", "m-2-of-3.gguf", "m-00002-of-00003.GGUF"])
def test_renamed_shard(tmp_path: Path, name: str) -> None:
    path = three_shards(tmp_path)[1].rename(tmp_path / name)
    assert re.search(r"is shard 2 of 3, and llama.cpp finds shards by name; rename it to \S+-00002-of-00003\.gguf$", refusal(path))


def test_swapped_shards(tmp_path: Path) -> None:
    first, second, third = three_shards(tmp_path)
    second.rename(tmp_path / "x")
    third.rename(second)
    (tmp_path / "x").rename(third)
    assert "has the wrong name or is of another model: its header says shard 3 of 3" in refusal(first)


def test_shard_of_another_model(tmp_path: Path) -> None:
    paths = three_shards(tmp_path)
    shutil.copy(write_shards(tmp_path / "other", "m", [rest(), experts(0), experts(1)])[1], paths[1])
    assert "tensor blk.0.ffn_gate_exps.weight is also in m-00001-of-00003.gguf" in refusal(paths[0])


def test_wrong_tensor_count(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "m", [rest(), experts(0) + experts(1)], total=99)
    assert "split.tensors.count says 99 tensors but the shards hold 12" in refusal(paths[0])


@pytest.mark.parametrize("split_no", [Typed(U32, 0), Typed(I32, 0), Typed(U16, 3), "0"])
def test_bad_split_number(tmp_path: Path, split_no: Value) -> None:
    paths = three_shards(tmp_path, extra={"split.no": split_no})
    assert "is not a proper shard: split.no" in refusal(paths[0])


def test_cut_shard_is_named(tmp_path: Path) -> None:
    paths = three_shards(tmp_path)
    with paths[2].open("r+b") as file:
        file.truncate(paths[2].stat().st_size - 500)
    assert refusal(paths[0]).startswith(f"{paths[2]}: is cut off: 500 of ")


# ---- files that are none --------------------------------------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.gguf") == f"{tmp_path}/no.gguf: no such file"
    assert "no such file" in refusal(f"{tmp_path}/a\0b")


def test_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be read: Not a directory" in refusal(tmp_path / "file" / "m.gguf")


def test_directory(tmp_path: Path) -> None:
    assert "is a directory; give the .gguf file in it" in refusal(tmp_path)


def test_device() -> None:
    assert refusal("/dev/null") == "/dev/null: is not a regular file"


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, rest())

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod would not stop root
    assert refusal(path).endswith(": cannot be read: Permission denied")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"tjgg" + bytes(40), "is not a GGUF file but an old GGJT file"),
        (b"lmgg" + bytes(40), "is not a GGUF file but an old GGML file"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file but a zip archive"),
        (b"\x20\x01" + bytes(6) + b'{"__metadata__":{}}', "is not a GGUF file but a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is not a GGUF file but a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "is not a GGUF file but a web page"),
        (b"hello", "is not a GGUF file (it starts with b'hell' in place of b'GGUF')"),
        (b"GG", "is not a GGUF file (it starts with b'GG' in place of b'GGUF')"),
    ],
)
def test_foreign_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert message in refusal(path)


# ---- damaged files --------------------------------------------------------------------------------------------------------------------------

GOOD = rest() + experts(0) + experts(1)


def test_cut_anywhere(tmp_path: Path) -> None:
    """Every length that loses a byte of a tensor, from the magic on, gives one error; lost padding at the end does not matter."""
    whole = write(tmp_path, GOOD).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(4, 2500, 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert re.search("has a damaged or incomplete header|is cut off", refusal(path)), length


def test_missing_bytes_are_counted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", keys(), GOOD, cut=1000)
    assert f"is cut off: 1,000 of {path.stat().st_size + 1000:,} bytes are missing; download or copy it again" in refusal(path)


def test_lost_padding_is_fine(tmp_path: Path) -> None:
    assert read_facts(write_gguf(tmp_path / "m.gguf", "qwen3moe", keys(), [*GOOD, Tensor("last", (4,))], cut=16)).is_moe


@pytest.mark.parametrize("shift", [-32, 32, 1, 1 << 40])
def test_overlapping_tensors(tmp_path: Path, shift: int) -> None:
    message = refusal(write(tmp_path, [Tensor("first", (EMBED,)), Tensor("second", (EMBED,), shift=shift)]))
    assert f"has tensors that overlap or leave gaps (tensor 'second' has offset {256 + shift}, expected 256)" in message


@pytest.mark.parametrize("type_id", [4, 5, 31, 33, 36, 38, 43, 137, 200, 2**31 - 1])
def test_unknown_tensor_type(tmp_path: Path, type_id: int) -> None:
    message = refusal(write(tmp_path, [*rest(), Tensor("blk.0.ffn_up_exps.weight", (EMBED, FF, 4), "Q8_0", type_id=type_id)]))
    assert "has a tensor type that llama.cpp does not know, of a fork or another version (tensor 'blk.0.ffn_up_exps.weight'" in message
    assert f"type {type_id}" in message


def test_damaged_headers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    arch, good = "qwen3moe", keys()
    write_gguf(path, arch, good, [*GOOD, GOOD[0]])
    assert "(duplicate tensor name 'token_embd.weight' for tensor 12)" in refusal(path)
    write_gguf(path, arch, good, GOOD, repeat="qwen3moe.block_count")
    assert "(duplicate key 'qwen3moe.block_count' for KV pair 7)" in refusal(path)
    write_gguf(path, arch, {**good, "general.alignment": 24}, GOOD)
    assert "(alignment 24 is not a power of 2)" in refusal(path)
    write_gguf(path, arch, good, [*GOOD, Tensor("t", (2**40, 2**40))][-1:], cut=2**82)  # a size beyond 64 bits; no data is written
    assert "incorrect shape for a tensor 't' may cause overflow errors" in refusal(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [(1, "is a GGUF of version 1, which"), (9, "is made for a newer llama.cpp"), (3 << 24, "is for machines of the other byte order")],
)
def test_other_versions(tmp_path: Path, version: int, message: str) -> None:
    assert message in refusal(write_gguf(tmp_path / "m.gguf", "qwen3moe", keys(), GOOD, version=version))


# ---- models that make no sense --------------------------------------------------------------------------------------------------------------


def test_vocabulary_only(tmp_path: Path) -> None:
    assert "holds no tensors, only a vocabulary" in refusal(write(tmp_path, []))


def test_no_architecture(tmp_path: Path) -> None:
    assert "names no general.architecture" in refusal(write_gguf(tmp_path / "m.gguf", "", {}, GOOD))


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length"])
def test_missing_key(tmp_path: Path, key: str) -> None:
    metadata = keys()
    del metadata[key]
    assert f"has no qwen3moe.{key}, so it is no complete model" in refusal(write(tmp_path, GOOD, metadata=metadata))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_count": 0}, "block_count is 0, and llama.cpp takes 1 to 512"),
        ({"block_count": 513}, "block_count is 513, and llama.cpp takes 1 to 512"),
        ({"block_count": 1}, "has blk.1.ffn_gate_exps.weight, but qwen3moe.block_count is 1"),
        ({"block_count": "2"}, "block_count must be one whole number of 0 or more, and it is '2'"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3, more than the 2 blocks"),
        ({"expert_count": 1025}, "expert_count is 1025, and llama.cpp takes 1024 at most"),
        ({"expert_count": [4, 4]}, "expert_count must be one whole number of 0 or more, and it is a list of 2 values"),
        ({"expert_count": ["4"]}, "expert_count must be one whole number of 0 or more, and it is a list"),
        ({"expert_count": 8}, "block 0 has 4 experts in blk.0.ffn_gate_exps.weight, and qwen3moe.expert_count asks for 8"),
        ({"expert_count": 0}, "expert_used_count is 2, more than its 0 experts"),
        ({"expert_count": 0, "expert_used_count": 0}, "has 4 experts in blk.0.ffn_gate_exps.weight, and qwen3moe.expert_count asks for 0"),
        ({"expert_used_count": 5}, "expert_used_count is 5, more than its 4 experts"),
        ({"expert_used_count": 0}, "expert_used_count is 0 or missing, with 4 experts"),
        ({"expert_used_count": [2]}, "expert_used_count must list 2 whole numbers, one per block, and it is a list of 1 values"),
        ({"expert_used_count": 1.5}, "expert_used_count must be one whole number of 0 or more, and it is 1.5"),
        ({"expert_used_count": [2, 3]}, "expert_used_count is 3 for block 1 and 2 for block 0"),
        ({"expert_used_count": [0, 2]}, "expert_used_count is 0 for block 0, which has experts"),
        ({"expert_group_count": 4}, "expert_group_count is 4, not less than its 4 experts"),
        ({"expert_group_count": 3, "expert_group_used_count": 2}, "routes 4 experts in 3 groups of which 2 are used"),
        ({"expert_group_count": 2, "expert_group_used_count": 0}, "routes 4 experts in 2 groups of which 0 are used"),
    ],
)
def test_impossible_numbers(tmp_path: Path, changed: dict[str, Value], message: str) -> None:
    assert message in refusal(write(tmp_path, GOOD, metadata={**keys(), **changed}))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (experts(0)[:2], "block 0 has expert weights but no ffn_down_exps.weight"),
        (experts(0)[2:], "block 0 has expert weights but no ffn_up_exps.weight"),
        (experts(0) + fused(0)[:1], "has a fused ffn_gate_up_exps beside a separate gate or up"),
        (experts(0)[:2] + experts(0, n=5)[2:], "blk.0.ffn_gate_exps.weight holds 4 experts but blk.0.ffn_down_exps.weight holds 5"),
        (experts(0, n=0), "blk.0.ffn_gate_exps.weight has the shape 64 x 32 x 0, which holds no experts"),
        ([Tensor("blk.0.ffn_up_exps.weight", (EMBED, FF, 2, 2))], "has the shape 64 x 32 x 2 x 2, which holds no experts"),
        ([*experts(0), Tensor("blk.0.ffn_up_exps.bias", (FF, 5))], "blk.0.ffn_up_exps.bias must be F32 32 x 4 and is F32 32 x 5"),
        ([*experts(0), Tensor("blk.0.ffn_up_exps.bias", (FF, 4), "F16")], "blk.0.ffn_up_exps.bias must be F32 32 x 4 and is F16 32 x 4"),
        ([*experts(0), Tensor("blk.0.ffn_up_exps.scale", (4, 2))], "blk.0.ffn_up_exps.scale must be F32 4 and is F32 4 x 2"),
        ([*experts(0), Tensor("blk.0.ffn_up_exps.scale", (1,))], "blk.0.ffn_up_exps.scale must be F32 4 and is F32 1"),
        ([*experts(0), Tensor("blk.1.ffn_up_exps.bias", (FF, 4))], "has blk.1.ffn_up_exps.bias without the weight it belongs to"),
        ([Tensor("blk.0.ffn_gate.3.weight", (EMBED, FF))], "has one tensor per expert (blk.0.ffn_gate.3.weight), the old Mixtral layout; convert"),
    ],
)
def test_broken_expert_tensors(tmp_path: Path, tensors: list[Tensor], message: str) -> None:
    assert message in refusal(write(tmp_path, rest() + tensors))


def test_top_k_zero_in_a_block_with_experts(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, GOOD, arch="nemotron_h_moe", metadata=keys(2, 4, [2, 0])))
    assert "expert_used_count is 0 for block 1, which has experts" in message
