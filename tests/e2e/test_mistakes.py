"""Mistakes that new users make, and the lines that they get: each names the thing, the limit and the remedy.

`{}` stands for what differs from run to run: folders, ports, times. A line that is not here is one that nobody read.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.supervisor.conftest import Programs, wait_until
from tests.integration.supervisor.test_up import port_of
from tests.support.program import Program
from tests.support.stack import DEMO_MODEL, ROOT

KEY = "pk-mistakes"
ADAPTER = ROOT / "deploy" / "demo" / "paddock-demo-pirate-lora.gguf"
PORT_TAKEN = 98
FILES = {
    "three.yaml": "models: [{name: a b, path: demo.gguf, slots: many, llama: {n_btch: 3}}]",
    "one.yaml": "models: [{name: m, path: demo.gguf}]",
    "model.yaml": "model: [{name: m, path: demo.gguf}]",
    "missing.yaml": "models: [{name: m, path: nowhere.gguf}]",
    "alias.yaml": "models: [{name: m, path: demo.gguf}]\naliases: {gpt-4o: n}",
    "setting.yaml": "prot: 9000",
    "rules.yaml": "models: [{name: m, hf: a/b}, {name: m, path: x.gguf}]\naliases: {a: n, b: {targets: [o]}}",
    "gone.yaml": "models: [{name: m, path: gone.gguf}, {name: n, path: page.gguf, projector: lost.gguf}]",
    "broken.yaml": "models: [",
    "tabs.yaml": "models:\n\t- {name: m}",
    "empty.yaml": "",
    "notes.txt": "notes",
    "page.gguf": "<html>no model</html>",
    "access.yaml": "teams: {red: {}}",
    "two.yaml": json.dumps(
        {
            "models": [
                {"name": "m", "path": "demo.gguf", "slots": 1, "ctx": 256, "llama": {"n_threads": 1}},
                {"name": "elsewhere", "path": "demo.gguf", "workers": 0},
            ]
        }
    ),
}

BEFORE_ANYTHING_RUNS = [
    ("upp", 2, "upp: no such command (did you mean up?); `paddock --help` lists them"),
    ("stats", 2, "stats: no such command (did you mean status?); `paddock --help` lists them"),
    ("up --prot 9", 2, "unrecognized arguments: --prot 9 (did you mean --port?); `paddock up --help` lists the flags"),
    (
        "up demo.gguf",
        2,
        "unrecognized arguments: demo.gguf (did you mean --model demo.gguf?); `paddock up --help` lists the flags",
    ),
    ("up --ctx many", 2, "ctx: 'many' is not a whole number from 0 to 16777216 (from flag --ctx); change the flag"),
    ("up --port 99999", 2, "port: '99999' is not a whole number from 0 to 65535 (from flag --port); change the flag"),
    (
        "up --hf nonsense",
        2,
        "--hf: 'nonsense' is not OWNER/NAME[:QUANT][@REVISION], such as Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M; see "
        "docs/catalog.md for what each field takes",
    ),
    (
        """up --llama '{"n_btch": 3}'""",
        2,
        "--llama: unknown field `n_btch` (did you mean `n_batch`?); see docs/catalog.md for what each field takes",
    ),
    (
        "up --llama '{n_batch: 3}'",
        2,
        "--llama: not valid JSON (JSON is malformed: object keys must be strings (byte 1)); give a JSON object, such "
        """as '{"n_batch": 512}'""",
    ),
    (
        "up --alias 'a b'",
        2,
        "--alias: 'a b' is no name: letters, digits and `._:/@+-`, from a letter or digit on, 128 at most; see "
        "docs/catalog.md for what each field takes",
    ),
    ("up --model nowhere.gguf", 65, "model nowhere: no file {}/nowhere.gguf; check the path"),
    (
        "up --model page.gguf",
        65,
        "model page: {}/page.gguf is not a GGUF file (it begins with b'<htm'); convert it to GGUF",
    ),
    (
        "up --catalog nowhere.yaml",
        2,
        "nowhere.yaml: No such file or directory; --catalog must name a readable file",
    ),
    (
        "up --catalog three.yaml",
        2,
        "three.yaml: 3 faults:\n"
        "  models[0] (a b): name: 'a b' is no name: letters, digits and `._:/@+-`, from a letter or digit on, 128 at "
        "most\n"
        "  models[0] (a b): slots: expected `int`, got `str`\n"
        "  models[0] (a b): llama: unknown field `n_btch` (did you mean `n_batch`?); see docs/catalog.md for what each "
        "field takes",
    ),
    (
        "up --catalog model.yaml",
        2,
        "model.yaml: unknown field `model` (did you mean `models`?); see docs/catalog.md for what each field takes",
    ),
    ("up --catalog missing.yaml", 65, "model m: no file {}/nowhere.gguf; check the path"),
    ("up --catalog alias.yaml", 2, "alias.yaml: aliases.gpt-4o: no model is named 'n'; use one of: m"),
    (
        "up --catalog one.yaml --model demo.gguf",
        2,
        "--catalog and --model each say what to serve; give one of them (`paddock config show` tells from where)",
    ),
    (
        "up --catalog one.yaml --slots 4",
        2,
        "slots: with a catalog, say this per model in one.yaml and leave it out here",
    ),
    ("up --config setting.yaml", 2, "prot: setting.yaml: no such setting (did you mean port?); docs/settings.md {}"),
    ("up --port {port}", PORT_TAKEN, "port {} on 127.0.0.1 is in use; give another with --port"),
    (
        "up --host 192.0.2.1",
        2,
        "can't listen on 192.0.2.1: Cannot assign requested address; give an address of this machine with --host",
    ),
    (
        "up --open --host 0.0.0.0",
        2,
        "--open lets everybody in without a key, so it is for loopback only, and --host 0.0.0.0 can be reached from "
        "other machines; leave --open out, and give callers keys, or leave --host out",
    ),
    (
        "up --state-dir page.gguf",
        2,
        "state_dir: can't use {}/page.gguf: File exists; name a folder that you may write to with --state-dir",
    ),
    ("up --models-dir nowhere", 2, "models_dir: {}/nowhere: No such file or directory; name a folder of GGUF files"),
    (
        "up --redis-url http://x",
        2,
        "redis_url: must begin with redis://, rediss://, unix://, {} (from flag --redis-url); change the flag",
    ),
    (
        "gateway",
        2,
        "paddock gateway: no Redis is named; set PADDOCK_REDIS_URL (such as redis://127.0.0.1:6379/0), or run `paddock "
        "up`, which starts a private one",
    ),
    ("worker", 2, "model is unset: a worker serves one GGUF file; give --model FILE.gguf"),
    (
        "status --url http://127.0.0.1:1",
        68,
        "nothing answers at http://127.0.0.1:1 ({}); start a gateway with `paddock up`, or name another with --url",
    ),
    (
        "keys create --url http://127.0.0.1:1",
        68,
        "nothing answers at http://127.0.0.1:1 ({}); start a gateway with `paddock up`, or name another with --url",
    ),
    (
        "bench --url http://127.0.0.1:1",
        1,
        "nothing answers at http://127.0.0.1:1 ({}); start a gateway with `paddock up`, or name another with --url",
    ),
    (
        "keys lst",
        2,
        "keys: argument COMMAND: 'lst' is not known (did you mean list?); use one of: list, show, create, update, "
        "delete, block, unblock, rotate, make; `paddock keys --help` tells how it is used",
    ),
    (
        "limits set team red --requests-per-minute 5",
        2,
        "limits set: --requests-per-minute is not known (did you mean --rpm?); `paddock limits set --help` tells how "
        "it is used",
    ),
    ("models lst", 2, "models lst: no such command (did you mean list?); use one of: list, pull, plan, show, {}"),
    (
        "pull nonsense",
        2,
        "models pull: nonsense: no model of the catalog has this name (paddock-demo), and it is no reference of the "
        "hub, OWNER/NAME[:QUANT][@REVISION]",
    ),
    (
        "up --catalog rules.yaml",
        2,
        "rules.yaml: 4 faults:\n"
        "  models[1] (m): the name is used twice; rename one of the two models\n"
        "  aliases.a: no model is named 'n'; use one of: m\n"
        "  aliases.b.targets[0]: no model is named 'o'; use one of: m\n"
        "  model m: no file {}/x.gguf; check the path",
    ),
    (
        "up --catalog gone.yaml",
        65,
        "3 faults:\n"
        "  model m: no file {}/gone.gguf; check the path\n"
        "  model n: {}/page.gguf is not a GGUF file (it begins with b'<htm'); convert it to GGUF\n"
        "  model n, projector: no file {}/lost.gguf; check the path",
    ),
    (
        "up --catalog broken.yaml",
        2,
        "broken.yaml: not valid YAML or JSON: line 1, column 10: expected the node content, but found '<stream end>' "
        "(while parsing a flow node); check brackets, quotes, colons and indentation there",
    ),
    (
        "up --catalog tabs.yaml",
        2,
        "tabs.yaml: not valid YAML or JSON: line 2, column 1: found character '\\t' that cannot start any token (while "
        "scanning for the next token); indent by spaces",
    ),
    (
        "up --catalog empty.yaml",
        2,
        "empty.yaml: it is empty; write a list of `models` into it; see docs/catalog.md for what each field takes",
    ),
    ("up --catalog .", 2, ".: Is a directory; --catalog must name a readable file"),
    ("up --models-dir demo.gguf", 2, "models_dir: {}/demo.gguf: Not a directory; name a folder of GGUF files"),
    (
        "up --model .",
        65,
        "model model: {} is a folder; name a GGUF file in it, or serve all that lies in it by --models-dir",
    ),
    (
        "up --model https://huggingface.co/a/b/resolve/main/x.gguf",
        2,
        "--model: https://huggingface.co/a/b/resolve/main/x.gguf is no file; name a model of the hub by --hf "
        "OWNER/NAME[:QUANT], or download the file first",
    ),
    (
        "up --hf https://huggingface.co/Qwen/Qwen3-8B-GGUF",
        2,
        "--hf: 'https://huggingface.co/Qwen/Qwen3-8B-GGUF' is not OWNER/NAME[:QUANT][@REVISION], such as "
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M (did you mean Qwen/Qwen3-8B-GGUF?); see docs/catalog.md for what each "
        "field takes",
    ),
    ("up --slots 0", 2, "slots: '0' is not a whole number from 1 to 254 (from flag --slots); change the flag"),
    ("up -c 4096", 2, "unrecognized arguments: -c 4096 (did you mean --ctx?); `paddock up --help` lists the flags"),
    (
        "up -ngl 99",
        2,
        """unrecognized arguments: -ngl 99 (did you mean --llama '{"n_gpu_layers": 99}'?); `paddock up --help` lists """
        "the flags",
    ),
    (
        "up --flash-attn=on",
        2,
        """unrecognized arguments: --flash-attn=on (did you mean --llama '{"flash_attn": "on"}'?); `paddock up """
        "--help` lists the flags",
    ),
    (
        "up --parallel 4",
        2,
        "unrecognized arguments: --parallel 4 (did you mean --slots?); `paddock up --help` lists the flags",
    ),
    (
        """up --residency '{"ttl_s": 5}'""",
        2,
        """unrecognized arguments: --residency {"ttl_s": 5} (it is a field of a model in a catalog: give --catalog """
        "FILE, see docs/catalog.md); `paddock up --help` lists the flags",
    ),
    ("up --catalog", 2, "argument --catalog: expected one argument; `paddock up --help` lists the flags"),
    (
        "up demo",
        2,
        "unrecognized arguments: demo (name a model by --model FILE or --hf OWNER/NAME); `paddock up --help` lists the "
        "flags",
    ),
    (
        "up Qwen/Qwen3-8B-GGUF",
        2,
        "unrecognized arguments: Qwen/Qwen3-8B-GGUF (did you mean --hf Qwen/Qwen3-8B-GGUF?); `paddock up --help` lists "
        "the flags",
    ),
    (
        "up --host localhost:8080",
        2,
        "can't listen on localhost:8080: {}; give --host localhost, and the port with --port",
    ),
    ("up --uds .", 2, ". is there and is no socket; give another path for the socket"),
    (
        "up --adapters pirate.gguf",
        2,
        "--adapters: not valid JSON (JSON is malformed: invalid character (byte 0)); give a JSON list, such as "
        """'[{"name": "pirate", "path": "pirate.gguf"}]'""",
    ),
    (
        """up --sampling '{"temp": 1}'""",
        2,
        "--sampling: unknown field `temp` (did you mean `temperature`?); see docs/catalog.md for what each field takes",
    ),
    (
        "up --chat-template nowhere.jinja",
        65,
        "model paddock-demo: chat_template: no file {}/nowhere.jinja; give a Jinja file, or a name such as chatml "
        "(docs/chat-templates.md)",
    ),
    ("up --projector nowhere.gguf", 65, "model paddock-demo, projector: no file {}/nowhere.gguf; check the path"),
    ("up --config nowhere.yaml", 2, "config: nowhere.yaml: No such file or directory; name a readable file or {}"),
    ("up --config notes.txt", 2, "config: notes.txt: must hold lines `setting: value`, not a str"),
    (
        "up --log-level loud",
        2,
        "log_level: 'loud' is not one of debug, info, warning, error (from flag --log-level); change the flag",
    ),
    ("serve", 2, "serve: no such command (did you mean up?); `paddock --help` lists them"),
    ("version", 2, "version: no such command (did you mean --version?); `paddock --help` lists them"),
    ("supervisor", 2, "redis_url is unset: a supervisor needs it; give --redis-url, or use `paddock up`"),
    (
        "status --url ftp://x",
        68,
        "ftp://x is no address of a server: begin it with http:// or https://; start a gateway with `paddock up`, or "
        "name another with --url",
    ),
    (
        "bench --modle x",
        2,
        "unrecognized arguments: --modle x (did you mean --model?); `paddock bench --help` lists the flags",
    ),
    (
        "drain gatway",
        2,
        "drain: argument gateway|worker: 'gatway' is not known (did you mean gateway?); use one of: gateway, worker; "
        "`paddock drain --help` lists the flags",
    ),
    (
        "drain worker --url http://127.0.0.1:1 --worker-secret s",
        1,
        "http://127.0.0.1:1 does not answer ({}); start the worker, or name another with --url",
    ),
    (
        "models plan --models-dir state",
        2,
        "models_dir: {}/state: No such file or directory; name a folder of GGUF files",
    ),
    ("models verify nobody", 2, "models verify: nobody: not found; `paddock models list` lists what is"),
    (
        "import notes.txt",
        2,
        "notes.txt: must be a mapping with `models` (llama-swap) or `model_list` (LiteLLM)",
    ),
    (
        "limits set tema red --rpm 5",
        2,
        "limits set: argument KIND: 'tema' is not known (did you mean team?); use one of: alias, key, organisation, "
        "team, user; `paddock limits set --help` tells how it is used",
    ),
    (
        "budgets set team red lots",
        2,
        "budgets set: argument AMOUNT: 'lots' is no amount; write it as 100 or 0.5; `paddock budgets set --help` tells "
        "how it is used",
    ),
    ("run", 2, "run: name a model; `paddock status` lists them"),
    (
        "drain",
        2,
        "drain: the following arguments are required: gateway|worker; `paddock drain --help` lists the flags",
    ),
]


def fits(line: str, wanted: str) -> bool:
    """Return whether a line is the wanted one, `{}` being anything."""
    return re.fullmatch(".+".join(map(re.escape, wanted.split("{}"))), line) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shutil.copy(DEMO_MODEL, tmp_path / "demo.gguf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def paddock(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Program:
    return Program(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(folder / "state")})


@pytest.mark.parametrize(("line", "code", "told"), BEFORE_ANYTHING_RUNS, ids=[one[0] for one in BEFORE_ANYTHING_RUNS])
def test_a_mistake_is_told_before_anything_runs(paddock: Program, line: str, code: int, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = paddock.run(line.replace("{port}", str(taken.getsockname()[1])))
    said = (done.out + done.err).strip().removeprefix("paddock: ")
    assert fits(said, told), said
    assert done.code == code


def test_a_file_that_is_no_model_and_a_redis_that_is_away(programs: Programs, folder: Path) -> None:
    adapter = programs.start("up", "--model", str(ADAPTER), "--port", "0")
    assert adapter.wait() == 65
    assert f"{ADAPTER}: a LoRA adapter and no model; name it among the `adapters` of its model" in adapter.text()
    away = programs.start("up", "--redis-url", "redis://127.0.0.1:1", "--redis-wait-s", "1", "--port", "0")
    assert away.wait() == 69
    assert "waiting up to 1 s (redis_wait_s)" in away.text()
    assert "no Redis at redis://127.0.0.1:1 after 1 s (Error 111" in away.text()
    assert "start it, or check --redis-url" in away.text()
    (folder / "logs").write_text("no folder")
    (programs.state).mkdir(exist_ok=True)
    shutil.rmtree(programs.state / "logs", ignore_errors=True)
    (programs.state / "logs").write_text("no folder")
    logs = programs.start("up", "--port", "0")
    assert logs.wait() == 2
    (line,) = logs.text().splitlines()
    assert line.endswith("logs: File exists; name a folder that you may write to with --state-dir")


CALLS: list[tuple[str, str, dict[str, Any] | None, int, str]] = [
    ("GET", "/v1/modles", None, 404, "There is no route GET /v1/modles. Did you mean /v1/models? {}"),
    ("GET", "/v1/chat/completions", None, 405, "GET /v1/chat/completions does not exist. Use POST."),
    ("POST", "/v1/chat/completions", {"model": "mm"}, 404, "The model `mm` does not exist. Use one of: elsewhere, m."),
    ("POST", "/v1/chat/completions", {"messages": "hi"}, 400, "`messages` is 'hi'. Send an array."),
    ("POST", "/v1/chat/completions", {"max_tokens": -5}, 400, "`max_tokens` is -5. Send at least -1."),
    ("POST", "/v1/chat/completions", {"temperature": "hot"}, 400, "`temperature` is 'hot'. Send a number."),
    (
        "POST",
        "/v1/embeddings",
        {"input": "x"},
        501,
        "The model `m` generates text and can't make embeddings. Ask it through POST /v1/chat/completions, or name a "
        "model that does (see GET /v1/models). {}",
    ),
    ("POST", "/models/load", {}, 400, "The model `m` is loaded already."),
    (
        "POST",
        "/models/load",
        {"model": "elsewhere"},
        501,
        "No supervisor keeps workers of `elsewhere`, so the gateway can't start them. Give the model `workers` or "
        "`residency` in the catalog of `paddock up` or `paddock supervisor`, or start them yourself.",
    ),
    ("POST", "/admin/keys", {"nme": "x"}, 400, "A key has no field `nme`; it has: name, {}"),
    ("POST", "/admin/keys", {"name": "x", "team": "nope"}, 400, "There is no team 'nope'; make it first."),
]
TURN = {"messages": [{"role": "user", "content": "hi"}]}


def _status(client: httpx2.Client, model: str) -> str:
    listed = client.get("/models").json()["data"]
    return next(str(one["status"]["value"]) for one in listed if one["id"] == model)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_calls_with_a_mistake_are_told_what_it_is(
    programs: Programs, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    up = programs.start("up", "--catalog", str(folder / "two.yaml"), "--port", "0", PADDOCK_API_KEY=KEY)
    up.until("Ctrl-C")
    assert " | WARNING" not in up.text(), "what a first start shows is what it did"
    url = f"http://127.0.0.1:{port_of(up)}"
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client:
        for method, path, body, status, wanted in CALLS:
            is_chat = path == "/v1/chat/completions"
            sent = None if body is None else {"model": "m", **(TURN if is_chat else {}), **body}
            if path == "/admin/keys":
                sent = body
            answer = client.request(method, path, json=sent)
            told = answer.json()["error"]["message"]
            assert fits(told, wanted), told
            assert answer.status_code == status, told
        refused = client.get("/v1/models", headers={"authorization": "Bearer pk-wrong"})
        assert fits(refused.json()["error"]["message"], "This API key is not known here. Check it for missing {}")
        assert client.post("/models/unload", json={"model": "m"}).status_code == 200
        wait_until(lambda: _status(client, "m") == "unloaded", up.text)
        unloaded = client.post("/v1/chat/completions", json={"model": "m", **TURN})
        assert unloaded.json()["error"]["message"] == (
            "Model 'm' is not loaded: an admin has unloaded it. Have an admin load it (POST /models/load)."
        )
        assert unloaded.elapsed.total_seconds() < 5
    paddock = Program(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(programs.state), "PADDOCK_API_KEY": KEY})
    for line, wanted in (
        (
            f"apply -f access.yaml --url {url}",
            "`teams`: Expected `array`, got `object`. The file is an object of lists: {}",
        ),
        (f"chat --model mm --prompt hi --url {url}", "no model is called mm; there are: elsewhere, m"),
        (f"stop mm --url {url}", "{}mm{}"),
        (
            f"status --url {url} --api-key pk-wrong",
            "This API key is not known here. {} (the key came from flag --api-key; {})",
        ),
    ):
        done = paddock.run(line)
        assert done.code != 0
        assert fits(done.err.strip().removeprefix("paddock: "), wanted), done.err
