"""Files of llama-swap as catalogs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.unit.gateway.imports.importing import imported
from workers.protocol.exits import Exit

HOUSE = """
logLevel: info
startPort: 5800
healthCheckTimeout: 300
apiKeys: [sk-one, "${env.NOT_SET}"]
macros:
  bin: /opt/llama/llama-server
  ctx: 4096
  base: >
    ${bin} --port ${PORT}
    --ctx-size ${ctx}
models:
  coder:
    macros: {ctx: 16384}
    cmd: |
      # the large one
      ${base} \\
        --model "/models/my coder.gguf"
      --parallel 2
    env: ["CUDA_VISIBLE_DEVICES=0,1", "LLAMA_ARG_FLASH_ATTN=on", "GGML_LOG=1"]
    aliases: [gpt-4o, {id: gpt-4o-mini, name: Mini, unlisted: true}]
    ttl: 0
    name: Coder
    filters:
      stripParams: "temperature, top_p, cache_salt"
      setParams: {top_k: 20, chat_template_kwargs: {effort: low}, user: x}
      setParamsByID: {"${MODEL_ID}:high": {top_k: 1}}
  embedder:
    cmd: ${bin} -m /models/embed.gguf --embeddings -ub 2048
    concurrencyLimit: 8
    checkEndpoint: none
  boxed:
    cmd: |
      docker run --name ${MODEL_ID} --rm -p ${PORT}:8080 -v /mnt/nvme:/models
      ghcr.io/ggml-org/llama.cpp:server -m /models/x.gguf -ngl 99
    cmdStop: docker stop ${MODEL_ID}
  other:
    cmd: vllm serve Qwen/Qwen3-8B --port ${PORT}
  vision:
    cmd: env A=1 llama-server -hf ggml-org/gemma-3-4b-it-GGUF
groups:
  large: {swap: true, exclusive: true, members: [coder, vision]}
  always: {swap: false, exclusive: false, persistent: true, members: [embedder]}
  none: {swap: false, exclusive: false, members: [boxed]}
hooks:
  on_startup: {preload: [gpt-4o, other]}
peers:
  cloud: {proxy: "https://example.com", apiKey: sk-secret, models: [a]}
"""


def test_a_whole_house_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported(tmp_path, capsys, HOUSE)
    assert made.code == 0, made.told
    assert made.document["models"] == [
        {
            "name": "coder-model",
            "llama": {"flash_attn": "on"},
            "path": "/models/my coder.gguf",
            "slots": 2,
            "ctx": 8192,
            "kv_tokens": 16384,
            "gpus": 2,
            "residency": {"min": 0, "max": 1, "ttl_s": 0, "group": "large", "preload": True},
        },
        {
            "name": "embedder",
            "path": "/models/embed.gguf",
            "llama": {"embeddings": True, "n_ubatch": 2048},
            "residency": {"min": 0, "max": 1, "ttl_s": 0, "pinned": True},
        },
        {
            "name": "boxed",
            "path": "/mnt/nvme/x.gguf",
            "llama": {"n_gpu_layers": 99},
            "residency": {"min": 0, "max": 1, "ttl_s": 0},
        },
        {
            "name": "vision",
            "hf": "ggml-org/gemma-3-4b-it-GGUF",
            "residency": {"min": 0, "max": 1, "ttl_s": 0, "group": "large"},
        },
    ]
    strip, fixed = ["temperature", "top_p"], {"top_k": 20, "chat_template_kwargs": {"effort": "low"}}
    chain = {"targets": ["coder-model"], "strip": strip, "set": fixed}
    assert made.document["aliases"] == {
        **dict.fromkeys(("coder", "gpt-4o", "gpt-4o-mini"), chain),
        "coder:high": {**chain, "set": fixed | {"top_k": 1}},
    }
    assert made.document["groups"] == {"large": {"at_once": 1, "exclusive": True}}
    digest = hashlib.sha256(b"sk-one").hexdigest()
    assert made.access == {
        "aliases": [{"name": "embedder", "limits": {"max_parallel": 8}}],
        "teams": [{"name": "imported"}],
        "keys": [{"name": "imported-1", "team": "imported", "sha256": digest}],
    }
    assert "sk-" not in made.text + made.told


def test_what_has_no_counterpart_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported(tmp_path, capsys, HOUSE)
    lines = made.told.splitlines()
    numbers = {text: number for number, text in enumerate(HOUSE.splitlines(), 1)}
    for mark, said in {
        "healthCheckTimeout: 300": "healthCheckTimeout: it has no counterpart; set start_timeout_s",
        "    name: Coder": "models.coder.name: it has no counterpart",
        '      stripParams: "temperature, top_p, cache_salt"': (
            "models.coder.filters.stripParams: cache_salt can't be dropped by an alias"
        ),
        "    filters:": "models.coder.filters: coder is an alias that changes parameters, of the model coder-model",
        "    cmd: vllm serve Qwen/Qwen3-8B --port ${PORT}": "models.other.cmd: vllm is no llama-server",
        "peers:": "peers: it has no counterpart; there is nothing for servers elsewhere",
        "  on_startup: {preload: [gpt-4o, other]}": "hooks.on_startup.preload[1]: other is no model of the catalog",
    }.items():
        number = numbers[mark]
        assert any(line.startswith(f"paddock: line {number}: {said}") for line in lines), (said, made.told)
    assert "setParams.user: an alias can't set it" in made.told
    assert "models.coder.env: GGML_LOG has no counterpart for one model; set it for `paddock up`" in made.told
    assert "apiKeys[1]: left out: " in made.told
    assert "the variable NOT_SET is not set" in made.told
    assert lines[-1] == "paddock: not needed in Paddock: --port, checkEndpoint, startPort"
    # The catalog has them too, above the model that they belong to.
    assert (
        made.text.index("models.coder.name")
        < made.text.index("- name: coder-model")
        < made.text.index("- name: embedder")
    )
    assert all(line.lstrip().startswith("#") for line in made.text.splitlines() if "no counterpart" in line)


def test_models_of_no_group_are_swapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = "models: {a: {cmd: llama-server -m a.gguf}, b: {cmd: llama-server -m b.gguf, ttl: -1}}\n"
    made = imported(tmp_path, capsys, models + "globalTTL: 120\n")
    assert made.document["groups"] == {"swap": {"at_once": 1, "exclusive": True}}
    assert [made.model(name)["residency"] for name in "ab"] == [
        {"min": 0, "max": 1, "ttl_s": 120, "group": "swap"},
        {"min": 0, "max": 1, "ttl_s": 120, "group": "swap"},
    ]
    assert "by the group `swap`; without it as many stay as fit into memory" in made.told
    matrix = "matrix: {vars: {x: a}, evict_costs: {x: 500}, sets: {all: x}}\n"
    made = imported(tmp_path, capsys, models + matrix)
    assert "groups" not in made.document
    assert made.model("a")["residency"]["priority"] == 100
    assert "matrix: it has no counterpart; what fits into memory together is in memory together" in made.told


@pytest.mark.parametrize(
    "more", ["swap: true, exclusive: false", "swap: false, exclusive: true", "swap: false, exclusive: false"]
)
def test_a_persistent_group_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str) -> None:
    ttl = 0 if "exclusive: true" in more else 60
    group = f"{{{more}, persistent: true, members: [a]}}"
    text = f"models: {{a: {{cmd: llama-server -m a.gguf, ttl: {ttl}}}}}\ngroups: {{g: {group}}}"
    made = imported(tmp_path, capsys, text)
    assert made.model("a")["residency"]["priority"] == 100
    assert "a leaves last (`priority`), but is not `pinned`" in made.told


def test_a_source_stands_for_a_program_that_is_no_llama_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "models: {q: {cmd: vllm serve Qwen/Qwen3-8B}}"
    made = imported(tmp_path, capsys, text)
    assert made.code == Exit.USAGE
    assert "no entry has weights that Paddock can serve; name a GGUF file" in made.told
    assert "models.q.cmd: vllm is no llama-server" in made.told, "why there is none"
    for source, field in (("ggml-org/q-GGUF:Q8_0", "hf"), ("models/q.gguf", "path"), ("./q", "path")):
        made = imported(tmp_path, capsys, text, "--source", f"q={source}")
        assert made.model("q")[field] == source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [a]", "line 1: models: must be a mapping"),
        ("models:\n  a: {cmd: llama-server -c x}", "line 2: models.a.cmd: -c x: not a whole number; correct it"),
        ("models:\n  a: {cmd: '${gone} -m x'}", "line 2: models.a.cmd: there is no macro gone; add it to `macros`"),
        ("macros: {x: '${y}', y: '${x}'}\nmodels: {a: {cmd: '${x}'}}", "its macros name each other in a circle"),
        ("models: {a: {cmd: '${env.NOT_SET}'}}", "the variable NOT_SET is not set"),
        ("models: {a: {cmd: llama-server -m x, ttl: soon}}", "models.a.ttl: 'soon' is no number of seconds"),
        ("models: {a: {cmd: llama-server -m x}}\ngroups: {g: {members: [b]}}", "line 2: groups.g.members[0]: no model"),
        ("models: {a: {cmd: llama-server -m x, aliases: [b, b]}}", "models.a.aliases[1]: b is an alias already"),
        ('models: {a: {cmd: "llama-server -m \'x"}}', "models.a.cmd: No closing quotation"),
        (
            "models: {a: {cmd: llama-server -m x --top-p 7}}",
            "can't be a catalog: catalog: models[0] (a): sampling.top_p: expected `float` <= 1.0",
        ),
        ("models: {a: {cmd: llama-server -m x, aliases: [a b]}}", "what it says can't be a catalog"),
        ("- 1", "must be a mapping with `models`"),
        ("a: [", "not valid YAML"),
        ("other: 1", "it has no `models` (llama-swap) or `model_list` (litellm); say whose file it is with --from"),
    ],
)
def test_mistakes_name_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    made = imported(tmp_path, capsys, text)
    assert (made.code, made.text, made.access) == (Exit.USAGE, "", {})
    assert f"paddock: {tmp_path / 'config.yaml'}: " in made.told
    assert said in made.told


def test_names_with_parameters_of_their_own_leave_the_model_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    high = "{chat_template_kwargs: {reasoning_effort: high}}"
    filters = "{setParamsByID: {'${MODEL_ID}': {}, '${MODEL_ID}:high': " + high + "}}"
    made = imported(tmp_path, capsys, f"models: {{a: {{cmd: llama-server -m a.gguf, filters: {filters}}}}}")
    assert made.document["aliases"] == {"a:high": {"targets": ["a"], "set": {"reasoning_effort": "high"}}}
    assert made.model("a")["path"] == "a.gguf"
