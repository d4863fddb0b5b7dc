"""Files of LiteLLM's proxy as catalogs, and as files for `paddock apply`."""

from __future__ import annotations

from pathlib import Path

import pytest

from accounts.access.declaration import read_declaration
from tests.unit.gateway.imports.importing import imported
from workers.protocol.exits import Exit

HOUSE = """
model_list:
  - model_name: chat
    litellm_params:
      model: openai/qwen3
      api_base: http://10.0.0.5:8080/v1
      api_key: sk-secret
      rpm: 100
      temperature: 0.7
  - model_name: chat
    litellm_params: {model: openai/qwen3, api_base: "http://10.0.0.6:8080/v1", rpm: 100}
  - model_name: chat
    litellm_params: {model: "ollama/hf.co/ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", rpm: 50, tpm: 20000}
  - model_name: embed
    litellm_params: {model: hosted_vllm/nomic-ai/nomic-embed-text-v1.5-GGUF}
    model_info: {mode: embedding, input_cost_per_token: 0.00000002}
  - model_name: claude
    litellm_params: {model: anthropic/claude-sonnet, api_key: os.environ/KEY}
  - model_name: "openai/*"
    litellm_params: {model: "openai/*"}
router_settings:
  routing_strategy: least-busy
  num_retries: 2
  redis_host: localhost
  fallbacks: [{chat: [claude, embed]}, {gone: [chat]}]
  model_group_alias: {gpt-4: chat, gpt-3: {model: embed, hidden: true}, lost: claude}
litellm_settings:
  drop_params: true
  request_timeout: 600
  callbacks: [prometheus]
general_settings:
  master_key: sk-1234
  database_url: postgres://u:secret@h/d
environment_variables: {A: b}
"""


def test_a_whole_house_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported(tmp_path, capsys, HOUSE, "--source", "openai/qwen3=/models/qwen3.gguf")
    assert made.code == 0, made.told
    assert made.document == {
        "models": [
            {"name": "qwen3", "path": "/models/qwen3.gguf", "workers": 2, "sampling": {"temperature": 0.7}},
            {"name": "gemma-3-4b-it-GGUF-Q4_K_M", "hf": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"},
            {
                "name": "embed",
                "hf": "nomic-ai/nomic-embed-text-v1.5-GGUF",
                "llama": {"embeddings": True},
                "price": {"per_million_prompt": 0.02},
            },
        ],
        "aliases": {
            "chat": {
                "targets": [
                    {"model": "qwen3", "weight": 200.0},
                    {"model": "gemma-3-4b-it-GGUF-Q4_K_M", "weight": 50.0},
                ],
                "fallbacks": ["embed"],
            },
            "gpt-4": {
                "targets": [
                    {"model": "qwen3", "weight": 200.0},
                    {"model": "gemma-3-4b-it-GGUF-Q4_K_M", "weight": 50.0},
                ],
                "fallbacks": ["embed"],
            },
            "gpt-3": "embed",
        },
    }
    assert made.access == {
        "aliases": [{"name": "chat", "limits": {"requests_per_minute": 250, "tokens_per_minute": 20000}}]
    }
    assert read_declaration((tmp_path / "access.yaml").read_bytes()).aliases == made.access["aliases"]
    assert "secret" not in made.text + made.told
    assert "sk-" not in made.text + made.told


def test_what_has_no_counterpart_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported(tmp_path, capsys, HOUSE, "--source", "openai/qwen3=/models/qwen3.gguf")
    numbers = {text: number for number, text in enumerate(HOUSE.splitlines(), 1)}
    for mark, said in {
        "    litellm_params: {model: anthropic/claude-sonnet, api_key: os.environ/KEY}": (
            "model_list[4].litellm_params.model: anthropic/claude-sonnet is at a remote provider"
        ),
        '  - model_name: "openai/*"': "model_list[5]: openai/*: names with `*` have no counterpart",
        "  redis_host: localhost": "router_settings.redis_host: it has no counterpart; set PADDOCK_REDIS_URL",
        "  request_timeout: 600": "litellm_settings.request_timeout: it has no counterpart; set request_timeout_s",
        "  master_key: sk-1234": "general_settings.master_key: it has no counterpart; preset the first key",
        "environment_variables: {A: b}": "environment_variables: it has no counterpart; set them for the process",
    }.items():
        assert f"paddock: line {numbers[mark]}: {said}" in made.told, made.told
    assert "router_settings.fallbacks[0].chat[0]: claude is not served by the catalog" in made.told
    assert "model_group_alias.lost: claude is not served by the catalog" in made.told
    assert "router_settings.fallbacks[1].gone: gone is not served by the catalog" in made.told
    assert "# - name: claude" in made.text
    assert "not needed in Paddock: api_base, api_key, drop_params, num_retries, routing_strategy\n" in made.told


def test_default_fallbacks_stand_in_for_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
model_list:
  - {model_name: a, litellm_params: {model: ollama/x}}
  - {model_name: b, litellm_params: {model: ollama/y}}
litellm_settings: {default_fallbacks: [b]}
"""
    made = imported(tmp_path, capsys, text, "--source", "a=a.gguf", "--source", "b=b.gguf")
    assert made.document == {
        "models": [{"name": "x", "path": "a.gguf"}, {"name": "b", "path": "b.gguf"}],
        "aliases": {"a": {"targets": ["x"], "fallbacks": ["b"]}},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_list: {a: 1}", "line 1: model_list: must be a list"),
        (
            "model_list:\n  - {model_name: a}",
            "line 2: model_list[0]: must have a `model_name` and `litellm_params.model`",
        ),
        ("model_list:\n  - 7", "line 2: model_list[0]: must be a mapping"),
        (
            "model_list:\n  - {model_name: a, litellm_params: {model: openai/x}}",
            "no entry has weights that Paddock can",
        ),
        (
            "model_list:\n  - {model_name: a, litellm_params: {model: hf.co/o/r, weight: lots}}",
            "model_list[0].litellm_params.weight: 'lots' is no weight; give a number",
        ),
        ("model_list:\n  - {model_name: a b, litellm_params: {model: x/o/r-GGUF}}", "what it says can't be a catalog"),
    ],
)
def test_mistakes_name_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    made = imported(tmp_path, capsys, text)
    assert made.code == Exit.USAGE
    assert said in made.told
    assert made.text == ""


def test_files_that_are_there_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model_list:\n  - {model_name: a, litellm_params: {model: x/o/r-GGUF, rpm: 1}}"
    output = tmp_path / "models.yaml"
    output.write_text("mine")
    made = imported(tmp_path, capsys, text, "-o", str(output))
    assert made.code == Exit.USAGE
    assert f"{output} is there already; name another file, or give --force" in made.told
    assert output.read_text() == "mine"
    assert made.access == {}
    assert imported(tmp_path, capsys, text, "-o", str(output), "--force").code == 0
    assert "name: a" in output.read_text()
    nowhere = imported(tmp_path, capsys, text, "-o", str(tmp_path / "no" / "folder"))
    assert nowhere.code == Exit.USAGE
    assert "name a file that you may write" in nowhere.told
