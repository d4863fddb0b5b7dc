"""Command lines of llama-server as models of a catalog."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import pytest

from gateway.commands.imports.llama_server import BadOption, read_command
from workers.models.spec import ModelSpec


def read(line: str) -> dict[str, Any]:
    """The entry, which the catalog's own struct takes."""
    entry = read_command(shlex.split(line)).entry
    msgspec.convert(
        {"name": "m", "path": "m.gguf", **entry} if "hf" not in entry else {"name": "m", **entry}, ModelSpec
    )
    return entry


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("-m a.gguf", {"path": "a.gguf"}),
        ("-hf o/r-GGUF:Q8_0", {"hf": "o/r-GGUF:Q8_0"}),
        ("-hf o/r-GGUF:Q8_0 -hff r-Q4_0.gguf", {"hf": "o/r-GGUF:r-Q4_0.gguf"}),
        ("-c 8192", {"ctx": 8192, "kv_tokens": 8192}),
        ("-c 8192 -np 4", {"ctx": 2048, "kv_tokens": 8192, "slots": 4}),
        ("-c 8192 -np 4 -kvu", {"ctx": 8192, "kv_tokens": 8192, "slots": 4}),
        ("-c 0 -np -1", {}),
        ("-ngl all", {}),
        ("-ngl auto", {}),
        ("-ngl 20", {"llama": {"n_gpu_layers": 20}}),
        ("-fa -ngl 0", {"llama": {"flash_attn": "on", "n_gpu_layers": 0}}),
        ("-fa off", {"llama": {"flash_attn": "off"}}),
        ("-fa 1", {"llama": {"flash_attn": "on"}}),
        ("-t -1", {}),
        ("-t 6 -tb 8", {"llama": {"n_threads": 6, "n_threads_batch": 8}}),
        ("--no-mmap --mlock", {"llama": {"use_mmap": False, "use_mlock": True}}),
        ("-lm mlock", {"llama": {"use_mmap": False, "use_mlock": True}}),
        ("-lm mmap+mlock", {"llama": {"use_mmap": True, "use_mlock": True}}),
        ("-ts 3,1", {"llama": {"tensor_split": [3.0, 1.0]}, "gpus": 2}),
        ("-sm row -mg 1", {"llama": {"split_mode": "row", "main_gpu": 1}, "gpus": 2}),
        ("-dev CUDA0,CUDA2", {"llama": {"devices": ["CUDA0", "CUDA2"]}, "gpus": 2}),
        ("-dev none", {"llama": {"devices": ["none"]}}),
        ("--rope-scaling yarn --rope-scale 4", {"llama": {"rope_scaling": "yarn", "rope_freq_scale": 0.25}}),
        ("--embeddings --pooling mean", {"llama": {"embeddings": True, "pooling": "mean"}}),
        ("--reranking", {"llama": {"pooling": "rank"}}),
        ("--temp 0.6 --top-k 20 -s -1", {"sampling": {"temperature": 0.6, "top_k": 20, "seed": -1}}),
        ("--samplers 'top_k;temperature'", {"sampling": {"samplers": ["top_k", "temperature"]}}),
        (r"--dry-sequence-breaker '\n'", {"sampling": {"dry_sequence_breakers": ["\n"]}}),
        ("--mmproj p.gguf --no-mmproj-offload", {"projector": "p.gguf", "projector_on_gpu": False}),
        ("--no-mmproj", {"projector": "none"}),
        ("--lora x/a.gguf", {"adapters": [{"name": "a", "path": "x/a.gguf", "pinned": True, "scale": 1.0}]}),
        ("--lora-scaled a.gguf:0.5", {"adapters": [{"name": "a", "path": "a.gguf", "pinned": True, "scale": 0.5}]}),
        ("--lora-scaled a.gguf 0.5", {"adapters": [{"name": "a", "path": "a.gguf", "pinned": True, "scale": 0.5}]}),
        (
            "--lora a.gguf,b/a.gguf --lora-init-without-apply",
            {
                "adapters": [
                    {"name": "a", "path": "a.gguf", "pinned": True, "scale": 0.0},
                    {"name": "a-2", "path": "b/a.gguf", "pinned": True, "scale": 0.0},
                ]
            },
        ),
        (
            "-md d.gguf -ngld 10 --draft-max 8",
            {"speculation": {"draft": {"path": "d.gguf", "n_gpu_layers": 10, "n_max": 8}}},
        ),
        ("-hfd o/d --draft 64", {"speculation": {"draft": {"hf": "o/d", "n_max": 32}}}),
        ("--draft-max 8", {}),
        ("--reasoning-budget 0 -rea off", {"thinking_budget": 0, "thinking": "off"}),
        ("--chat-template-kwargs '{\"a\": 1}'", {"chat_template_kwargs": {"a": 1}}),
        ("--reasoning-effort low", {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        (
            "--override-kv a.b=int:4,c=bool:false --override-kv d=str:x",
            {"llama": {"override_kv": {"a.b": 4, "c": False, "d": "x"}}},
        ),
        ("-ot 'exps=CPU'", {"llama": {"override_tensor": [{"pattern": "exps", "buffer": "CPU"}]}}),
        ("-Cr 0-3", {"llama": {"cpus": "0-3"}}),
        ("--host 0.0.0.0 --port 1 --jinja --metrics", {}),
    ],
)
def test_options_become_fields(line: str, entry: dict[str, Any]) -> None:
    assert read(line) == entry


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-c many", "-c many: not a whole number"),
        ("-c", "-c has no value"),
        ("-m --jinja", "-m has no value"),
        ("--temp warm", "--temp warm: not a number"),
        ("--chat-template-kwargs {", "not valid JSON"),
        ("--override-kv a=complex:1", "'complex' is no type"),
        ("--rope-scale 0", "must be above 0"),
    ],
)
def test_values_that_make_no_sense(line: str, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        read(line)


def test_what_is_lost_is_told_without_secrets() -> None:
    line = "-m a.gguf -n -1 --api-key sk-secret -cram 4096 --new-switch --port 9 -hf o/r --draft-max 99 -md d.gguf"
    reading = read_command(shlex.split(line))
    assert reading.lost == [
        "-n -1 has no counterpart; bound answers by `max_tokens` of a team's or key's limits",
        "--api-key has no counterpart; callers' keys are made by `paddock keys create`",
        "-cram 4096 has no counterpart; set cache_ram_mib for the machine's workers",
        "--new-switch has no counterpart",
        "--draft-max 99: a draft has 32 tokens at most",
        "-hf o/r is left out, since -m names a file",
    ]
    assert reading.unneeded == {"--port"}
