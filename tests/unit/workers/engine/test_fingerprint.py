from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from workers.engine.disk.fingerprint import (
    HARMLESS,
    ModelChanged,
    ModelHashes,
    context_facts,
    fingerprint,
    parts_of,
    system_fingerprint,
)
from workers.llama.gguf import read_header
from workers.llama.native import build_id
from workers.models.overrides import TensorOverride
from workers.models.spec import ControlVectorSpec, LlamaSettings

DEMO = Path(__file__).resolve().parents[4] / "deploy" / "demo" / "paddock-demo.gguf"
HEADER = read_header(DEMO)


def aged(path: Path, contents: bytes, seconds: float = 2.1) -> Path:
    """A file that has been as it is for long enough to be remembered."""
    path.write_bytes(contents)
    time.sleep(seconds)
    return path


def kv(
    settings: LlamaSettings, *, build: str = "one", n_ctx: int = 1024, model: bytes = b"m" * 32, control: str = ""
) -> bytes:
    return fingerprint(model, context_facts(HEADER, settings, build=build, n_ctx=n_ctx, control=control))


def test_what_changes_the_kv_changes_the_fingerprint() -> None:
    plain = kv(LlamaSettings())
    others = [
        kv(LlamaSettings(), model=b"n" * 32),
        kv(LlamaSettings(), build="two"),
        kv(LlamaSettings(cache_type_k="q8_0")),
        kv(LlamaSettings(cache_type_v="q8_0")),
        kv(LlamaSettings(flash_attn="off")),
        kv(LlamaSettings(flash_attn="on")),
        kv(LlamaSettings(swa_full=True)),
        kv(LlamaSettings(n_gpu_layers=0)),
        kv(LlamaSettings(rope_scaling="linear", rope_freq_scale=0.5)),
        kv(LlamaSettings(rope_scaling="yarn", rope_freq_scale=0.5)),
        kv(LlamaSettings(rope_freq_scale=0.5)),
        kv(LlamaSettings(rope_freq_base=5e5)),
        kv(LlamaSettings(yarn_orig_ctx=512)),
        kv(LlamaSettings(yarn_ext_factor=0.5)),
        kv(LlamaSettings(yarn_attn_factor=0.5)),
        kv(LlamaSettings(yarn_beta_slow=2)),
        kv(LlamaSettings(yarn_beta_fast=16)),
        kv(LlamaSettings(override_kv={"llama.rope.freq_base": 5e5})),
        kv(LlamaSettings(override_kv={"llama.rope.freq_base": 6e5})),
        kv(LlamaSettings(override_tensor=(TensorOverride(pattern="ffn", buffer="CPU"),))),
        kv(LlamaSettings(), control="one"),
        kv(LlamaSettings(), control="two"),
    ]
    assert len({plain, *others}) == 1 + len(others)
    assert len(plain) == 32
    assert kv(LlamaSettings(), n_ctx=4096) == plain
    assert kv(LlamaSettings(n_batch=64, n_ubatch=32, n_threads=3, use_mmap=False)) == plain
    assert kv(LlamaSettings(numa="distribute")) == kv(LlamaSettings(cpus="0-3")) == plain
    moved = LlamaSettings(control_vectors=(ControlVectorSpec(path="elsewhere.gguf"),))
    assert kv(moved, control="one") == kv(LlamaSettings(), control="one")


def test_every_harmless_setting_is_one() -> None:
    assert {field.name for field in msgspec.structs.fields(LlamaSettings)} >= HARMLESS


def test_a_model_with_long_rope_factors_counts_on_which_side_of_its_context_it_is() -> None:
    arch = HEADER.text("general.architecture")
    tensor = next(iter(HEADER.tensors.values()))
    metadata = {**HEADER.metadata, f"{arch}.rope.scaling.original_context_length": 2048}
    header = replace(HEADER, tensors={"rope_factors_long.weight": tensor}, metadata=metadata)
    facts = [context_facts(header, LlamaSettings(), build="", n_ctx=n_ctx) for n_ctx in (1024, 2048, 2049, 8192)]
    assert [fact["long_rope"] for fact in facts] == [False, False, True, True]


def test_the_build_is_named() -> None:
    assert build_id() == build_id()
    assert build_id().split()[0] == "0.3.36"
    assert len(build_id().split()[1]) == 32


def test_a_model_hash_covers_every_byte_and_is_remembered(tmp_path: Path) -> None:
    model, memory = aged(tmp_path / "m.gguf", b"x" * 20_000_000), tmp_path / "hashes.json"
    digest = ModelHashes(memory).digest([model])
    assert digest == hashlib.sha256(hashlib.sha256(b"x" * 20_000_000).digest()).digest()
    assert memory.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    def never() -> bool:
        raise AssertionError("it was hashed again")

    assert ModelHashes(memory).digest([model], stop=never) == digest
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert ModelHashes(memory).digest([link], stop=never) == digest
    with model.open("r+b") as file:
        file.seek(12_345_678)
        file.write(b"y")
    os.utime(model, ns=(0, 0))
    assert ModelHashes(memory).digest([model]) != digest


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    model, memory = tmp_path / "m.gguf", tmp_path / "hashes.json"
    model.write_bytes(b"x")
    first = ModelHashes(memory).digest([model])
    assert not memory.exists()
    model.write_bytes(b"y")
    assert ModelHashes(memory).digest([model]) != first


def test_a_model_that_changed_since_it_was_loaded_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    hashes = ModelHashes(tmp_path / "hashes.json")
    with pytest.raises(ModelChanged, match="changed after it was loaded"):
        hashes.digest([model], loaded_at=time.time() - 60)
    assert hashes.digest([model], loaded_at=time.time() + 1)
    assert hashes.digest([model], stop=lambda: True) is None


def test_a_model_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x" * 20_000_000)

    def meddle() -> bool:
        with model.open("ab") as file:
            file.write(b"more")
        return False

    with pytest.raises(ModelChanged, match="changed while it was read"):
        ModelHashes(tmp_path / "hashes.json").digest([model], stop=meddle)


@pytest.mark.parametrize("contents", [b"", b"[]", b'{"a": 1}', b"\xff\xfe", b'{"m": ["x"]}', b'{"m": ["x", "\xff"]}'])
def test_a_damaged_memory_only_costs_time(tmp_path: Path, contents: bytes) -> None:
    model, memory = tmp_path / "m.gguf", tmp_path / "hashes.json"
    model.write_bytes(b"x")
    memory.write_bytes(contents)
    assert ModelHashes(memory).digest([model]) == ModelHashes(tmp_path / "none").digest([model])
    assert ModelHashes(tmp_path / "no folder" / "file").digest([model])


def test_parts_of_a_split_model_are_all_counted() -> None:
    header = replace(
        HEADER, path=Path("/models/big-00001-of-00003.gguf"), metadata={**HEADER.metadata, "split.count": 3}
    )
    assert [path.name for path in parts_of(header)] == [f"big-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert parts_of(HEADER) == [DEMO]


def test_callers_tell_files_and_builds_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(bytes(3 << 20))
    other.write_bytes(one.read_bytes()[:-1] + b"x")
    assert system_fingerprint([one], "b1") == system_fingerprint([one], "b1")
    told = {system_fingerprint(paths, build) for paths in ([one], [other], [one, other]) for build in ("b1", "b2")}
    assert len(told) == 6
    assert all(re.fullmatch("b[^ ]*-[0-9a-f]{16}", each) for each in told)
