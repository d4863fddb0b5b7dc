"""Usage records for tests, written as the ledger's writer writes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from accounts.access.changes import Changes, PublishedLater
from accounts.access.keys import Keys
from accounts.access.mirror import Adoption
from accounts.access.records import KINDS
from accounts.access.rights import system
from accounts.access.subjects import Subjects
from accounts.api.api import AdminRequest
from accounts.database.database import Database
from accounts.ledger.rows import write_batch, write_sums
from accounts.ledger.writer import Follower
from accounts.protocol.caller import Caller
from accounts.protocol.records import Role
from accounts.protocol.usage import UsageBatch, UsageRecord

BEGIN = datetime(2026, 9, 29, 22, 15, tzinfo=UTC).timestamp()
OUTCOMES = ("ok", "ok", "ok", "ok", "ok", "cut", "client_gone", "queue_timeout")


def record(number: int, **fields: Any) -> UsageRecord:
    """A call of team red by key ci, unless the fields say otherwise."""
    ended_at = fields.pop("ended_at", BEGIN)
    usual: dict[str, Any] = {
        "request_id": f"req-{number}",
        "started_at": ended_at - 1.5,
        "ended_at": ended_at,
        "route": "/v1/chat/completions",
        "outcome": "ok",
        "status": 200,
        "organisation": "default",
        "team": "red",
        "key": "ci",
        "alias": "chat",
        "model": "llama",
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "cost_nano": 1_000_000,
    }
    return UsageRecord(number=number, **{**usual, **fields})


def some_records(count: int, seed: int = 1, over_s: float = 40 * 86_400.0) -> list[UsageRecord]:
    """Calls of several teams, keys, people and models from `BEGIN` on; their ends are in no order."""
    chance = random.Random(seed)
    made = []
    for number in range(1, count + 1):
        team = chance.choice(("red", "red", "red", "blue", "green"))
        made.append(
            record(
                number,
                ended_at=BEGIN + chance.choice((chance.random() * over_s, chance.randrange(10) * 3600.0)),
                outcome=chance.choice(OUTCOMES),
                team=team,
                organisation="north" if team == "green" else "default",
                key=f"{team}-{chance.randrange(3)}",
                user=chance.choice(("", "ann@example.com", "bob@example.com")),
                end_user=chance.choice(("", "", "=customer", "guest")),
                alias=chance.choice(("chat", "code")),
                model=chance.choice(("llama", "qwen")),
                prompt_tokens=chance.randrange(5000),
                cached_tokens=chance.randrange(50),
                completion_tokens=chance.randrange(900),
                queue_ms=chance.randrange(100),
                compute_ms=chance.randrange(9000),
                cost_nano=chance.randrange(10**9),
            )
        )
    return made


def write(
    database: Database, records: Sequence[UsageRecord], follower: Follower | None = None, process: str = "a" * 16
) -> None:
    """Write records as one transaction of the ledger does."""
    with database.transaction() as connection:
        new = write_batch(connection, UsageBatch(process=process, records=tuple(records)))
        write_sums(connection, new)
        if follower is not None:
            follower.on_written(connection, new)


def asked(
    role: Role = "admin", *, key: str = "first", team: str = "default", user: str = "", **query: str
) -> AdminRequest:
    """A request of a caller. A parameter's last underscore is dropped: `from_` is `from`."""
    caller = Caller(key=key, team=team, user=user, role=role)
    return AdminRequest(caller, {}, {name.rstrip("_"): value for name, value in query.items()}, b"", {})


def make_subject(database: Database, kind: str, name: str, **fields: Any) -> None:
    """Make a record of access, or change it."""
    _make_default(database)
    subjects, of = Subjects(Changes(database, PublishedLater())), KINDS[kind]  # type: ignore[index]
    listed = subjects.page(system("test"), of, after="", limit=1000)
    if any(stored.record.name == name for stored in listed):
        subjects.update(system("test"), of, name, fields)
    else:
        subjects.create(system("test"), of, {"name": name, **fields})


def _make_default(database: Database) -> None:
    """Make the organisation and the team of whatever names none."""
    Adoption(database, "a gateway secret of this test").prepare()


def make_key(database: Database, name: str, team: str, **fields: Any) -> str:
    """Make a key, and return it."""
    keys = Keys(Changes(database, PublishedLater()), "a gateway secret of this test")
    return keys.mint(system("test"), {"name": name, "team": team, **fields}).secret
