from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

from workers.llama.gguf import BLOCKS, MAX_KEPT_ARRAY, read_header
from workers.llama.native import ModelError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("Small")
    writer.add_block_count(3)
    writer.add_array("llama.attention.head_count_kv", [4, 2, 4])
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_token_list([b"tok%d" % number for number in range(MAX_KEPT_ARRAY + 1)])
    writer.add_token_scores([0.5] * (MAX_KEPT_ARRAY + 1))
    writer.add_tensor("a.weight", np.ones((8, 64), dtype=np.float32))
    blocks = np.zeros((4, 68), dtype=np.uint8)
    writer.add_tensor("b.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_header_is_read(model: Path) -> None:
    header = read_header(model)
    assert (header.version, header.num_tensors) == (3, 2)
    assert header.tensor_bytes == 8 * 64 * 4 + 4 * 68
    assert header.text("general.name") == "Small"
    assert header.number("llama.block_count") == 3
    assert header.numbers("llama.attention.head_count_kv") == [4, 2, 4]
    assert header.numbers("llama.block_count") == [3]
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.number("general.name") is None
    assert header.numbers("no.such.key") == []
    assert "tokenizer.ggml.tokens" not in header.metadata


def test_every_cut_is_found(model: Path, tmp_path: Path) -> None:
    whole, cut = model.read_bytes(), tmp_path / "cut.gguf"
    ends = [4, 12, 30, 100, 5_000, len(whole) // 2, len(whole) - 300, len(whole) - 40]
    for end in ends:
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"cut\.gguf: truncated: .*download or copy it again"):
            read_header(cut)
    assert len(ends) == 8


def test_what_is_not_a_model_is_named(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other.gguf"
    whole = model.read_bytes()
    for content, message in [
        (b"", "the file is empty"),
        (b"PK\x03\x04zip", r"not a GGUF file \(it begins with b'PK"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF\x01\x00\x00\x00" + whole[8:], "GGUF version 1 is not supported"),
        (b"GGUF\x00\x00\x00\x03" + whole[8:], "byte order"),
        (whole[:24] + b"\xff" * 8 + whole[32:], "truncated"),
    ]:
        other.write_bytes(content)
        with pytest.raises(ModelError, match=message) as caught:
            read_header(other)
        assert str(other) in str(caught.value)
    with pytest.raises(ModelError, match="there is no such file"):
        read_header(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="this is a folder"):
        read_header(tmp_path)


def test_a_value_of_unknown_type_is_damage(model: Path, tmp_path: Path) -> None:
    data = bytearray(model.read_bytes())
    key = data.index(b"llama.block_count") + len(b"llama.block_count")
    data[key : key + 4] = b"\x63\x00\x00\x00"
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with pytest.raises(ModelError, match="damaged header"):
        read_header(damaged)


def test_all_parts_of_a_split_model_are_checked(tmp_path: Path) -> None:
    for part in (1, 2):
        writer = GGUFWriter(tmp_path / f"big-{part:05d}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        writer.add_tensor("a.weight", np.ones((8, 64), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first, second = sorted(tmp_path.iterdir())
    assert read_header(first).number("split.count") == 2
    second.write_bytes(second.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"big-00002-of-00002\.gguf: truncated"):
        read_header(first)
    second.unlink()
    with pytest.raises(ModelError, match=r"big-00002-of-00002\.gguf: there is no such file"):
        read_header(first)


def test_block_sizes_are_those_of_the_format() -> None:
    q8_1 = 9  # never stored in files; the reader that we compare with still has its old size
    known = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    shared = set(BLOCKS) & set(known) - {q8_1}
    assert len(shared) > 25
    assert {kind: BLOCKS[kind] for kind in shared} == {kind: known[kind] for kind in shared}
