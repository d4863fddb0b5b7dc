"""The commands over the admin API, against a gateway and an accounts service: what people see, and what scripts get."""

from __future__ import annotations

import json
import re
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from accounts.protocol.key_format import is_whole
from accounts.protocol.records import digest
from tests.support.program import Program
from tests.support.stack import Process, Stack, free_port
from workers.protocol.exits import Exit

MODEL = "small"
PATIENCE_S = 20.0
TODAY = datetime.now(UTC)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, "--step-ms", "2", "--tokens", "8")
        running.gateway(accounts_url=running.accounts().url)
        wait_until(lambda: status(running, "/admin/teams/default") == 200)
        yield running


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def environment(stack: Stack, gateway: Process) -> dict[str, str]:
    port = gateway.url.rpartition(":")[2]
    return {"PADDOCK_STATE_DIR": str(stack.folder / "state"), "PADDOCK_PORT": port, "PADDOCK_API_KEY": stack.key}


@pytest.fixture
def paddock(stack: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Program:
    return Program(monkeypatch, capfd, environment(stack, stack.gateways[0]))


def ask(stack: Stack, path: str, key: str = "", body: object = None) -> Any:
    """The gateway's answer to a request."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key or stack.key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(stack.gateways[0].url + path, content, headers)) as answer:
        return json.load(answer)


def status(stack: Stack, path: str, key: str = "", body: object = None) -> int:
    try:
        ask(stack, path, key, body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def answers(stack: Stack, key: str) -> bool:
    """Whether a call of the model is answered, within the second that gateways have to know a new key."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    wait_until(lambda: status(stack, "/v1/chat/completions", key, body) != 401)
    return status(stack, "/v1/chat/completions", key, body) == 200


def test_a_key_is_made_used_shown_and_deleted(stack: Stack, paddock: Program) -> None:
    paddock.ok("teams create red")
    made = paddock.ok("keys create --team red --name ci --alias small --expires 90d --rpm 600 --note who=bob")
    key = made.card["key"]
    assert is_whole(key)
    assert made.out.endswith(
        "\n\nKeep the key now: it is shown this once, and only its hash is stored. Its holder sends it with every "
        f"call:\nAuthorization: Bearer {key}\n"
    )
    assert answers(stack, key)
    shown = paddock.ok("keys show ci").card
    assert key not in str(shown)
    wanted = {"name": "ci", "state": "active", "team": "red", "role": "user", "models": "small", "notes": "who=bob"}
    assert wanted.items() <= shown.items()
    assert shown["limits"] == "600 requests per minute"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\dZ \(in 90 d\)", shown["expires"])
    table = paddock.ok("keys list --team red")
    assert table.rows[0] == ["NAME", "TEAM", "ROLE", "STATE", "MODELS", "EXPIRES", "LAST USED", "LIMITS"]
    assert table.rows[1][:6] == ["ci", "red", "user", "active", "small", "in 90 d"]
    assert table.rows[1][7] == "rpm 600"
    assert len({line.find("red") for line in table.out.splitlines()[1:]}) == 1, "columns are aligned"
    assert paddock.ok("keys block ci").card["state"] == "blocked"
    assert paddock.ok("keys unblock ci").card["state"] == "active"
    changed = paddock.ok("keys update ci --expires none --rpm none --max-tokens 2k --alias all --note who=").card
    assert ("limits" in changed, "notes" in changed) == (False, False)
    assert (changed["expires"], changed["max tokens"], changed["models"]) == ("never", "2,000", "all")
    assert paddock.ok("keys delete ci").out == "The key ci is deleted.\n"
    assert paddock.ok("keys list --team red").out == "There are no keys.\n"


def test_both_keys_work_while_one_is_rotated(stack: Stack, paddock: Program) -> None:
    paddock.ok("teams create rotators")
    old = paddock.ok("keys create --team rotators --name turning").card["key"]
    rotated = paddock.ok("keys rotate turning --grace 1h --idempotency-key lost").card
    again = paddock.ok("keys rotate turning --grace 1h --idempotency-key lost").card
    assert rotated["key"] == again["key"] != old
    assert rotated["state"] == "rotated"
    assert rotated["old secret"].startswith("works until ")
    assert [answers(stack, key) for key in (old, rotated["key"])] == [True, True]


def test_teams_users_organisations_and_aliases(paddock: Program) -> None:
    assert paddock.ok("organisations create acme --tpm 1M").card["limits"].startswith("1,000,000 tokens per minute")
    made = paddock.ok("teams create blue --organisation acme --alias small,big --note cost-centre=42").card
    assert (made["organisation"], made["models"], made["notes"]) == ("acme", "small, big", "cost-centre=42")
    paddock.ok("teams create pink --organisation acme")
    table = paddock.ok("teams list --organisation acme")
    assert table.rows[1:] == [["blue", "acme", "active", "small, big"], ["pink", "acme", "active", "all"]]
    user = paddock.ok("users create ann@example.com --team blue:manager --team pink --email ann@example.com").card
    assert (user["teams"], user["email"]) == ("blue (manager), pink", "ann@example.com")
    changed = paddock.ok("users update ann@example.com --team pink:none --admin").card
    assert (changed["teams"], changed["role"]) == ("blue (manager)", "admin")
    assert paddock.ok("users list --team blue").rows[1][:2] == ["ann@example.com", "ann@example.com"]
    assert paddock.ok("teams block pink").card["state"] == "blocked"
    paddock.ok("keys create --team pink --name of-pink")
    message = paddock.refused("teams delete pink", Exit.REFUSED)
    assert "--with-keys" in message
    assert paddock.ok("teams delete pink --with-keys").out == "The team pink is deleted.\n"
    paddock.ok("aliases create org/model --tpm 100k")
    assert paddock.ok("aliases show org/model").card["name"] == "org/model"
    assert paddock.ok("aliases list").rows == [["NAME", "LIMITS"], ["org/model", "tpm 100,000"]]
    paddock.ok("aliases delete org/model")
    assert paddock.ok("organisations list").rows[0] == ["NAME", "STATE", "LIMITS"]


def test_limits_and_budgets(paddock: Program) -> None:
    paddock.ok("teams create limited")
    flags = "--rpm 600 --tpm 100000 --parallel 8 --tokens-per-day 5M"
    shown = paddock.ok(f"limits set team limited {flags}").card["limits"].split(" / ")
    assert shown[0] == "600 requests per minute"
    assert shown[2:] == ["8 calls at once", "5,000,000 tokens per day"]
    assert paddock.ok("limits set team limited --rpm none").card["limits"].startswith("100,000 tokens")
    table = paddock.ok("limits list team").rows
    assert table[0] == ["NAME", "TPM", "PARALLEL", "TOKENS/DAY"]
    assert ["limited", "100,000", "8", "5,000,000"] in table
    paddock.ok("budgets set team limited 100 --per month --time-zone Europe/Berlin --warn-at 0.5,0.8")
    paddock.ok("budgets set team limited 5 --per day --warn-only --warn-at none")
    told = paddock.ok("budgets set team limited 200").card["budgets"].split(" / ")
    assert told == ["5.00 per day, warns only, warns not", "200.00 per month (Europe/Berlin), warns at 50%, 80%"]
    table = paddock.ok("budgets list team limited").rows
    assert table[0] == ["KIND", "NAME", "BUDGET (USD)", "PER", "SPENT", "LEFT", "USED", "STATE", "RENEWS"]
    assert table[2][:8] == ["team", "limited", "200.00", "month", "0.00", "200.00", "0%", "ok"]
    assert "day" not in paddock.ok("budgets delete team limited --per day").card["budgets"]
    assert "limits" not in paddock.ok("limits clear team limited").card
    assert "budgets" not in paddock.ok("budgets delete team limited").card
    assert paddock.ok("budgets list team limited").out == "There are no budgets.\n"


def test_prices_and_usage(stack: Stack, paddock: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paddock.ok("prices list").out == (
        "The price list is empty: calls cost what the catalog says, or nothing. The currency is USD.\n"
    )
    paddock.ok(f"prices set {MODEL} --prompt 0.5 --completion 1.5")
    later = paddock.ok(f"prices set {MODEL} --completion 2.5 --from 30d").card
    assert (later["prompt"], later["completion"]) == ("0.50", "2.50")
    assert paddock.ok("prices currency EUR").out == "The currency is EUR.\n"
    rows = paddock.ok("prices list").rows
    assert rows[:2] == [
        ["MODEL", "FROM", "NOW", "PROMPT", "CACHED", "COMPLETION", "GPU SECOND"],
        [MODEL, "ever", "yes", "0.50", "0.00", "1.50", "0.00"],
    ]
    paddock.ok("teams create users")
    key = paddock.ok("keys create --team users --name caller").card["key"]
    assert answers(stack, key)
    ask(stack, "/v1/chat/completions", key, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    wait_until(lambda: "  3  " in f"{paddock.ok('usage --team users').out}".replace("\n", "  "))
    sums = paddock.ok("usage --by team,model --since 7d --team users")
    head, table = sums.out.split("\n\n")
    assert re.fullmatch(r"Calls from \S+ \S+ to .+", head)
    cells = [line.split() for line in table.splitlines()]
    assert cells[0][:4] == ["TEAM", "MODEL", "CALLS", "FAILED"]
    assert cells[1][:4] == ["users", MODEL, "3", "0"]
    assert paddock.ok("usage --by day --team users").out.count(f"{TODAY:%Y-%m-}") >= 1
    calls = paddock.ok("usage calls --team users --limit 2")
    assert calls.rows[0][:5] == ["ENDED", "TEAM", "KEY", "MODEL", "OUTCOME"]
    assert [row[1:5] for row in calls.rows[1:3]] == [["users", "caller", MODEL, "ok"]] * 2
    [cursor] = re.findall(r"^There is more: add (--cursor \S+)$", calls.out, re.MULTILINE)
    assert len(paddock.ok(f"usage calls --team users --limit 2 {cursor}").rows) == 2
    assert paddock.ok("usage calls --team users --outcome failed").out == "There were no calls.\n"
    for name, begin in (("calls.csv", b"id,request_id,"), ("calls.parquet", b"PAR1")):
        file = tmp_path / name
        assert paddock.ok(f"usage export --team users -o {file}").out.startswith(f"{file}: ")
        assert file.read_bytes().startswith(begin)
    assert "can't be written" in paddock.refused(f"usage export -o {tmp_path}/no/file", Exit.USAGE)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    paddock.ok(f"prices delete {MODEL}")
    assert "no price now" in paddock.refused(f"prices delete {MODEL}", Exit.USAGE)


def test_the_audit_tells_changes_and_whether_it_is_whole(stack: Stack, paddock: Program) -> None:
    paddock.ok("teams create audited --rpm 300")
    paddock.ok("teams update audited --rpm 600")
    paddock.ok("teams delete audited")
    rows = paddock.ok("audit --team audited").rows
    assert rows[0] == ["NUMBER", "WHEN", "WHO", "FROM", "DID", "WHAT", "CHANGE"]
    assert [row[2:5] for row in rows[1:]] == [
        ["key:first", "127.0.0.1", deed] for deed in ("delete", "update", "create")
    ]
    assert rows[2][6] == "limits.requests_per_minute 300 → 600"
    assert rows[3][6] == "limits.requests_per_minute=300, organisation=default"
    assert paddock.ok("audit verify").out.startswith("The audit is whole: ")
    with sqlite3.connect(stack.folder / "state" / "accounts.sqlite") as database:
        database.execute("UPDATE audit SET actor = 'key:other' WHERE subject = 'audited' AND action = 'update'")
    broken = paddock.run("audit verify")
    assert (broken.code, broken.err) == (Exit.BROKEN, "")
    assert re.match(r"The audit is not whole: entry \d+ was altered\.", broken.out)
    with sqlite3.connect(stack.folder / "state" / "accounts.sqlite") as database:
        database.execute("UPDATE audit SET actor = 'key:first' WHERE subject = 'audited' AND action = 'update'")


def test_a_file_is_applied(paddock: Program, tmp_path: Path) -> None:
    file = tmp_path / "access.yaml"
    file.write_text(
        f"""
teams:
  - name: green
    limits: {{requests_per_minute: 600}}
keys:
  - {{name: declared, team: green, sha256: {digest("pk-declared")}, expires_at: 2031-01-31}}
"""
    )
    expected = """+ team green
    organisation=default
    limits.requests_per_minute=600
+ key declared
    team=green
    role=user
    expires_at=2031-01-31 00:00Z

2 to make: {}.
"""
    assert paddock.ok(f"apply -f {file} --dry-run").out == expected.format("nothing is done yet, as --dry-run says")
    assert "green" not in paddock.ok("teams list").out
    assert paddock.ok("apply -f -", stdin=file.read_text()).out == expected.format("done")
    assert paddock.ok(f"apply -f {file}").out == "All is as the file declares it.\n"
    assert paddock.ok("keys show declared").card["declared"] == "in a file (`paddock apply`)"
    file.write_text("teams: [{name: green, limits: {requests_per_minute: 60}}]")
    assert paddock.ok(f"apply -f {file} --prune").out == (
        "~ team green\n    limits.requests_per_minute 600 → 60\n- key declared\n\n1 to change, 1 to delete: done.\n"
    )
    assert "can't be read" in paddock.refused(f"apply -f {tmp_path}/none.yaml", Exit.USAGE)
    file.write_text("teams: [{name: green, rpm: 3}]")
    assert "teams[0]" in paddock.refused(f"apply -f {file}", Exit.REFUSED)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("keys list", "/admin/keys"),
        ("teams show default", "/admin/teams/default"),
        ("budgets list", "/admin/budgets"),
        ("prices list", "/admin/prices"),
        ("audit --limit 2", "/admin/audit?limit=2"),
        ("usage calls --limit 5", "/admin/usage?limit=5"),
    ],
)
def test_json_is_the_answer_of_the_api(command: str, path: str, stack: Stack, paddock: Program) -> None:
    assert json.loads(paddock.ok(f"{command} --json").out) == ask(stack, path)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("keys show nobody", Exit.REFUSED, ["nobody", "`paddock keys list`"]),
        ("keys create --name x --team nowhere", Exit.REFUSED, ["There is no team 'nowhere'; make it first."]),
        ("keys create --name session-ci", Exit.REFUSED, ["'session-ci' is reserved", "choose another"]),
        ("keys make --name user:ann", Exit.USAGE, ["'user:ann' is reserved"]),
        ("teams create default", Exit.REFUSED, ["default"]),
        ("keys list --api-key pk-wrong", Exit.FORBIDDEN, ["flag --api-key"]),
        ("keys list --url http://127.0.0.1:1", Exit.NO_GATEWAY, ["nothing answers", "--url"]),
        ("keys list --tem red", Exit.USAGE, ["did you mean --team?"]),
        ("keys lst", Exit.USAGE, ["'lst' is not known (did you mean list?)"]),
        ("keys show", Exit.USAGE, ["NAME"]),
        ("keys update ci", Exit.USAGE, ["no change is given"]),
        ("keys create --expires soon", Exit.USAGE, ["'soon' is no time", "30d"]),
        ("keys rotate ci --grace 1x", Exit.USAGE, ["'1x' is no duration", "12h"]),
        ("limits set team default --rpm many", Exit.USAGE, ["'many' is no number", "100k"]),
        ("limits set team default", Exit.USAGE, ["no limit is given"]),
        ("limits set room default --rpm 3", Exit.USAGE, ["'room'", "team"]),
        ("budgets set team default 5 --time-zone Mars", Exit.REFUSED, ["Europe/Berlin"]),
        ("users create ann --team red:king", Exit.USAGE, ["TEAM:manager"]),
        ("usage --by colour", Exit.REFUSED, ["hour, day, month"]),
        ("prices set small", Exit.USAGE, ["no price is given"]),
        ("login --key pk-in-the-history", Exit.USAGE, ["use one of: -;"]),
        ("logout", Exit.USAGE, ["no key is kept"]),
    ],
)
def test_errors_are_one_line_with_a_remedy(command: str, code: Exit, words: list[str], paddock: Program) -> None:
    message = paddock.refused(command, code)
    assert [word for word in words if word not in message] == []


def test_a_manager_is_told_what_it_may_not_do(stack: Stack, paddock: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    paddock.ok("teams create managed")
    key = paddock.ok("keys create --team managed --name boss --role manager").card["key"]
    monkeypatch.setenv("PADDOCK_API_KEY", key)
    wait_until(lambda: status(stack, "/admin/whoami", key) == 200)
    assert paddock.ok("keys create --name of-boss").card["team"] == "managed"
    assert paddock.ok("teams list").rows[1][0] == "managed"
    assert "role manager" in paddock.refused("teams create other", Exit.FORBIDDEN)


def test_a_key_that_comes_in_is_kept_for_its_address_alone(
    stack: Stack, paddock: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PADDOCK_API_KEY")
    monkeypatch.delenv("PADDOCK_PORT")
    monkeypatch.setenv("PADDOCK_STATE_DIR", str(tmp_path))
    url = stack.gateways[0].url
    assert "no key" in paddock.refused(f"login --url {url} --key -", Exit.USAGE, stdin="\n")
    assert "not known here" in paddock.refused(f"login --url {url} --key -", Exit.FORBIDDEN, stdin="pk-wrong\n")
    file = tmp_path / "logins.json"
    assert not file.exists()
    told = paddock.ok(f"login --url {url} --key -", stdin=f"{stack.key}\n").out
    assert told == (f"The key is valid: admin in the team default.\nThe key for {url} is kept in {file}.\n")
    assert file.stat().st_mode & 0o777 == 0o600
    assert paddock.ok("teams list").rows[1][0] != ""
    assert paddock.ok(f"teams list --url {url}/v1").code == 0
    elsewhere = paddock.refused(f"teams list --url {url.replace('127.0.0.1', 'localhost')}", Exit.FORBIDDEN)
    assert "--api-key" in elsewhere
    assert paddock.ok("logout").out == (
        f"The key for {url} is removed. It stays valid until somebody deletes or blocks it.\n"
    )
    assert stack.key not in file.read_text()
    file.write_text("{")
    assert "remove it" in paddock.refused(f"teams list --url {url}", Exit.USAGE)


def test_a_gateway_without_the_service_says_what_to_do(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone = stack.gateway()
    paddock = Program(monkeypatch, capfd, environment(stack, alone))
    message = paddock.refused("keys list", Exit.REFUSED)
    assert "paddock accounts" in message
    assert "`paddock keys make`" in message
    monkeypatch.delenv("PADDOCK_API_KEY")
    monkeypatch.setenv("PADDOCK_STATE_DIR", str(tmp_path))
    assert "The key is valid." in paddock.ok(f"login --url {alone.url} --key -", stdin=stack.key).out


def test_with_a_port_for_admins_commands_go_there(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    split = stack.gateway(accounts_url=stack.accounts_url, admin_port=port)
    paddock = Program(monkeypatch, capfd, environment(stack, split))
    assert f"port {port}" in paddock.refused("teams list", Exit.REFUSED)
    monkeypatch.setenv("PADDOCK_ADMIN_PORT", str(port))
    assert paddock.ok("teams list").rows[0][0] == "NAME"


def test_a_limit_and_a_budget_are_hit_and_shown(stack: Stack, paddock: Program) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    paddock.ok("teams create bounded")
    key = paddock.ok("keys create --team bounded --name eager --rpm 2").card["key"]
    wait_until(lambda: status(stack, "/v1/models", key) == 200)
    assert [status(stack, "/v1/chat/completions", key, body) for _ in range(3)] == [200, 200, 429]
    paddock.ok("keys update eager --rpm none")
    paddock.ok(f"prices set {MODEL} --prompt 0.5 --completion 1.5")
    paddock.ok("budgets set team bounded 0.00001")
    wait_until(lambda: status(stack, "/v1/chat/completions", key, body) == 429)
    paddock.ok("budgets set team bounded 100")
    wait_until(lambda: status(stack, "/v1/chat/completions", key, body) == 200)
    paddock.ok(f"prices delete {MODEL}")
