"""Teams that call a gateway in several dialects at once, as long as they are let: load for boards to show.

Each caller asks one thing after the other, with a think time between. What they get is counted and not looked at;
a caller that is turned away asks on.
"""

from __future__ import annotations

import collections
import http.client
import itertools
import json
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

from accounts.protocol.records import digest

SYSTEM = "You are a patient teller of tales who never hurries and says each thing in plain words. " * 4
TALES = ("a cat and a boat", "the old mill", "rain on a tin roof", "a lost key", "two brothers", "the last train")


@dataclass(frozen=True, slots=True)
class Team:
    name: str
    callers: int
    think_s: float = 0.2
    """On average, between an answer and the next question."""

    @property
    def key(self) -> str:
        return f"pk-{self.name}-0123456789abcdef"


def keys_of(teams: tuple[Team, ...]) -> str:
    """The setting `api_keys`."""
    return json.dumps([{"name": team.name, "team": team.name, "sha256": digest(team.key)} for team in teams])


def _chat(model: str, tale: str, stream: bool) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Tell of {tale}."}]
    return {"model": model, "messages": messages, "stream": stream, "max_tokens": 24}


def _requests(model: str, tale: str) -> dict[str, tuple[str, dict[str, object]]]:
    """Kind -> path and body: one question in each dialect, and some that go wrong."""
    form = {"type": "json_schema", "json_schema": {"name": "tale", "schema": {"type": "object", "required": ["t"]}}}
    return {
        "chat": ("/v1/chat/completions", _chat(model, tale, stream=True)),
        "whole": ("/v1/chat/completions", _chat(model, tale, stream=False)),
        "form": ("/v1/chat/completions", _chat(model, tale, stream=False) | {"response_format": form}),
        "text": ("/v1/completions", {"model": model, "prompt": f"This is a tale of {tale}", "max_tokens": 16}),
        "native": ("/completion", {"model": model, "prompt": f"A tale of {tale}", "n_predict": 16}),
        "responses": ("/v1/responses", {"model": model, "input": f"Tell of {tale}.", "max_output_tokens": 16}),
        "messages": (
            "/v1/messages",
            {"model": model, "max_tokens": 16, "messages": [{"role": "user", "content": f"Tell of {tale}."}]},
        ),
        "unknown": ("/v1/completions", {"model": "nobody-serves-this", "prompt": "x"}),
    }


MIX = ("chat",) * 8 + ("whole", "text", "native", "responses", "messages", "form") * 2 + ("unknown",)


@dataclass(slots=True)
class TeamsAtWork:
    """Callers of all teams, each in a thread of its own, from `with` to its end."""

    urls: tuple[str, ...]
    model: str
    teams: tuple[Team, ...]
    told: collections.Counter[int] = field(default_factory=collections.Counter)
    """Status -> answers; 0: the connection broke."""
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> TeamsAtWork:
        for team in self.teams:
            for place in range(team.callers):
                self.add(team, place)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30.0)

    def add(self, team: Team, place: int) -> None:
        """One more caller."""
        thread = threading.Thread(target=self._work, args=(team, place), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, team: Team, place: int) -> None:
        dice = random.Random(f"{team.name}-{place}")
        for number in itertools.count():
            if self._over.is_set():
                return
            path, body = _requests(self.model, dice.choice(TALES))[dice.choice(MIX)]
            url = self.urls[(place + number) % len(self.urls)]
            self.told[ask(url, path, body, team.key)] += 1
            self._over.wait(dice.expovariate(1 / team.think_s))


def ask(url: str, path: str, body: Mapping[str, object], key: str, timeout_s: float = 60.0) -> int:
    """The status of the answer, which is read to its end; 0 where the connection broke or took too long."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
