from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gguf import GGUFWriter

from tests.support.stack import DEMO_MODEL
from workers.llama.gguf import read_header
from workers.llama.header_cache import MOST_KEPT, HeaderCache
from workers.llama.native import ModelError
from workers.models.files import FRESH_NS


def write(path: Path, name: str) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_array("llama.attention.head_count_kv", [4, 2, 4])
    writer.add_float32("llama.rope.freq_base", float("inf"))
    writer.add_uint64("llama.large", 2**64 - 1)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_tensor("a.weight", np.ones((8, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def settle() -> None:
    """Wait until files that were written count as unchanged."""
    time.sleep(FRESH_NS / 1e9 + 0.05)


def rename(kept: Path, name: str) -> None:
    """Have what is kept say another name than its file, so that it shows which of the two is read."""
    told = msgspec.msgpack.decode(kept.read_bytes())
    told["metadata"]["general.name"] = name
    kept.write_bytes(msgspec.msgpack.encode(told))


def test_a_header_is_kept_whole_and_read_again(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "m.gguf", "First"), tmp_path / "headers"
    settle()
    for file in (path, DEMO_MODEL):
        cache = HeaderCache(folder)
        before = {*folder.glob("*")}
        assert cache.read(file) == read_header(file)
        (kept,) = {*folder.iterdir()} - before
        assert kept.stat().st_mode & 0o777 == 0o600
        assert HeaderCache(folder).read(file) == read_header(file)
        rename(kept, "kept")
        assert cache.read(file).text("general.name") == "kept"


def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "m.gguf", "First"), tmp_path / "headers"
    cache = HeaderCache(folder)
    assert cache.read(path).text("general.name") == "First"
    assert not folder.exists(), "it has just been written, and a new change may not show"
    settle()
    cache.read(path)
    write(path, "Other")  # of the same size
    assert cache.read(path).text("general.name") == "Other"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="truncated"):
        cache.read(path)
    path.unlink()
    with pytest.raises(ModelError, match="there is no such file"):
        cache.read(path)


def test_all_parts_of_a_split_model_are_kept(tmp_path: Path) -> None:
    for part in (1, 2):
        writer = GGUFWriter(tmp_path / f"big-{part:05d}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"{part}.weight", np.ones((8, 64), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    settle()
    first, cache = tmp_path / "big-00001-of-00002.gguf", HeaderCache(tmp_path / "headers")
    for _ in range(2):
        assert cache.read(first) == read_header(first)
        assert set(cache.read(first).tensors) == {"1.weight", "2.weight"}
    assert len([*(tmp_path / "headers").iterdir()]) == 2


def test_a_cache_that_is_damaged_or_in_the_way_costs_only_time(tmp_path: Path) -> None:
    folder = tmp_path / "headers"
    HeaderCache(folder).read(DEMO_MODEL)
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    other = msgspec.msgpack.encode({**msgspec.msgpack.decode(whole), "reading": "another way"})
    for content in (b"", whole[:100], b"\x91" * 100_000, b"null", other):
        kept.write_bytes(content)
        assert HeaderCache(folder).read(DEMO_MODEL) == read_header(DEMO_MODEL)
        assert kept.read_bytes() == whole
    (tmp_path / "file").write_bytes(b"")
    assert HeaderCache(tmp_path / "file").read(DEMO_MODEL) == read_header(DEMO_MODEL)


def test_few_headers_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "headers"
    folder.mkdir()
    for number in range(MOST_KEPT + 5):
        (folder / f"{number:032}").write_bytes(b"old")
    HeaderCache(folder).read(DEMO_MODEL)
    names = {path.name for path in folder.iterdir()}
    assert len(names) == MOST_KEPT
    assert f"{0:032}" not in names
    assert names - {f"{number:032}" for number in range(MOST_KEPT + 5)}, "the new one stays"
