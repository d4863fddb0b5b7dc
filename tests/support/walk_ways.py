"""The two ways in which a platform engineer does the same things: requests to the admin API, and commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import httpx2

from tests.support.browser import Browser
from tests.support.program import Program
from tests.support.stack import ROOT

TIMEOUT_S = 60


@dataclass(slots=True)
class Asker:
    """Asks a gateway with a key."""

    url: str
    key: str

    def ask(self, method: str, path: str, body: object = None, status: int = 200, **headers: str) -> Any:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.send(method, path, body, **told)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def send(self, method: str, path: str, body: object = None, **headers: str) -> httpx2.Response:
        told = {"Authorization": f"Bearer {self.key}", **headers}
        if isinstance(body, bytes):
            return httpx2.request(method, f"{self.url}{path}", content=body, headers=told, timeout=TIMEOUT_S)
        return httpx2.request(method, f"{self.url}{path}", json=body, headers=told, timeout=TIMEOUT_S)


@dataclass(slots=True, frozen=True)
class Used:
    """What a key has used."""

    num_calls: int
    prompt_tokens: int
    completion_tokens: int


class Way(Protocol):
    """One way to do what docs/teams.md walks through."""

    def role(self) -> str:
        """Return the role of the first key."""
        ...

    def make_team(self, name: str) -> None: ...

    def make_key(self, name: str, team: str, role: str = "user") -> str:
        """Return the key that is shown once."""
        ...

    def limit_requests(self, key: str, per_minute: int | None) -> None:
        """Limit a key's requests per minute; None: not any more."""
        ...

    def set_price(self, model: str, prompt: float, completion: float) -> None:
        """Set prices of a million tokens."""
        ...

    def set_budget(self, team: str, amount: float) -> None: ...

    def budget_spent(self, team: str) -> float: ...

    def used(self, team: str) -> dict[str, Used]:
        """Return what each key of a team has used today."""
        ...

    def rotate(self, key: str, grace_s: int) -> str: ...

    def sign_in(self, own: Path) -> str:
        """Sign in by a browser; return the key of the session. `own`: an empty folder of the person's."""
        ...

    def apply(self, file: Path, *, dry_run: bool = False) -> list[str]:
        """Apply a file, and return what is (or would be) made: `team red`."""
        ...

    def is_audit_whole(self) -> bool: ...


@dataclass(slots=True)
class ByApi:
    """By requests."""

    asker: Asker

    def role(self) -> str:
        return str(self.asker.ask("GET", "/admin/whoami")["role"])

    def make_team(self, name: str) -> None:
        self.asker.ask("POST", "/admin/teams", {"name": name}, 201)

    def make_key(self, name: str, team: str, role: str = "user") -> str:
        return str(self.asker.ask("POST", "/admin/keys", {"name": name, "team": team, "role": role}, 201)["key"])

    def limit_requests(self, key: str, per_minute: int | None) -> None:
        self.asker.ask("PATCH", f"/admin/keys/{key}", {"limits": {"requests_per_minute": per_minute}})

    def set_price(self, model: str, prompt: float, completion: float) -> None:
        price = {"model": model, "per_million_prompt": prompt, "per_million_completion": completion}
        self.asker.ask("POST", "/admin/prices", price)

    def set_budget(self, team: str, amount: float) -> None:
        budgets = [{"amount": amount, "period": "month"}]
        self.asker.ask("PATCH", f"/admin/teams/{team}", {"limits": {"budgets": budgets}})

    def budget_spent(self, team: str) -> float:
        [budget] = self.asker.ask("GET", f"/admin/budgets?kind=team&name={team}")["data"]
        return float(budget["spent"])

    def used(self, team: str) -> dict[str, Used]:
        yesterday = f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}"
        summary = self.asker.ask("GET", f"/admin/usage/summary?from={yesterday}&group_by=key&team={team}")
        return {
            row["key"]: Used(row["num_calls"], row["prompt_tokens"], row["completion_tokens"])
            for row in summary["data"]
        }

    def rotate(self, key: str, grace_s: int) -> str:
        return str(self.asker.ask("POST", f"/admin/keys/{key}/rotate", {"grace_s": grace_s})["key"])

    def sign_in(self, own: Path) -> str:
        browser = Browser("127.66.1.1")
        answer = browser.open(f"{self.asker.url}/auth/login")
        assert answer.status_code == 200, answer.text
        return browser.cookie("paddock") or ""

    def apply(self, file: Path, *, dry_run: bool = False) -> list[str]:
        done = self.asker.ask("POST", f"/admin/apply?dry_run={str(dry_run).lower()}", file.read_bytes())
        assert {change["action"] for change in done["changes"]} <= {"create"}
        return [f"{change['kind']} {change['name']}" for change in done["changes"]]

    def is_audit_whole(self) -> bool:
        return bool(self.asker.ask("GET", "/admin/audit/verify")["is_whole"])


@dataclass(slots=True)
class ByCommand:
    """By commands, on the machine of `paddock up` and with the state folder of it."""

    paddock: Program
    url: str

    def role(self) -> str:
        return self.paddock.ok("keys show first").card["role"]

    def make_team(self, name: str) -> None:
        self.paddock.ok(f"teams create {name}")

    def make_key(self, name: str, team: str, role: str = "user") -> str:
        return self.paddock.ok(f"keys create --team {team} --name {name} --role {role}").card["key"]

    def limit_requests(self, key: str, per_minute: int | None) -> None:
        self.paddock.ok(f"limits set key {key} --rpm {per_minute or 'none'}")

    def set_price(self, model: str, prompt: float, completion: float) -> None:
        self.paddock.ok(f"prices set {model} --prompt {prompt} --completion {completion}")

    def set_budget(self, team: str, amount: float) -> None:
        self.paddock.ok(f"budgets set team {team} {amount:f} --per month")

    def budget_spent(self, team: str) -> float:
        [budget] = json.loads(self.paddock.ok(f"budgets list team {team} --json").out)["data"]
        return float(budget["spent"])

    def used(self, team: str) -> dict[str, Used]:
        rows = self.paddock.ok(f"usage --by key --since 1d --team {team}").rows
        found = [dict(zip(rows[2], row, strict=True)) for row in rows[3:]] if len(rows) > 2 else []
        return {
            row["KEY"]: Used(*(int(row[name].replace(",", "")) for name in ("CALLS", "PROMPT TOKENS", "ANSWER TOKENS")))
            for row in found
        }

    def rotate(self, key: str, grace_s: int) -> str:
        return self.paddock.ok(f"keys rotate {key} --grace {grace_s}s").card["key"]

    def sign_in(self, own: Path) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
        browser = f"{sys.executable} -m tests.support.browser %s"
        variables = clean | {"BROWSER": browser, "PYTHONPATH": str(ROOT), "PADDOCK_STATE_DIR": str(own)}
        command = [sys.executable, "-m", "gateway.cli", "login", "--url", self.url]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        [key] = re.findall(r'"key":"(pk-[^"]+)"', (own / "logins.json").read_text())
        return str(key)

    def apply(self, file: Path, *, dry_run: bool = False) -> list[str]:
        told = self.paddock.ok(f"apply -f {file}{' --dry-run' if dry_run else ''}").out
        assert not re.search("^[-~] ", told, re.MULTILINE)
        return re.findall(r"^\+ (.+)$", told, re.MULTILINE)

    def is_audit_whole(self) -> bool:
        return self.paddock.ok("audit verify").out.startswith("The audit is whole")
