"""What a program sent: its calls, as they stand in a JSON file of `tests/clients/requests`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "requests"

How = Literal["recorded", "read from source"]

ANSWER_ID = re.compile(r"<the id of answer (\d+)>")
"""Stands where a program sends the id of an earlier answer, which is another one with each replay."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request of a program."""

    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Those that a gateway may answer differently for, but for the key."""
    key: Literal["bearer", "x-api-key", "both", "none"]
    """Where the program puts the key."""
    body: Any = None

    @property
    def route(self) -> str:
        """As docs/compatibility.md names it: `POST /v1/chat/completions`."""
        return f"{self.method} {self.path.partition('?')[0]}"

    def __str__(self) -> str:
        """Return the route and what is special about the request, such as `POST /v1/messages streamed, 2 tools`."""
        body = self.body if isinstance(self.body, dict) else {}
        form = body.get("response_format") or (body.get("text") or {}).get("format") or body.get("output_format") or {}
        told = {
            "streamed": body.get("stream") is True,
            f"{len(body.get('tools') or ())} tools": bool(body.get("tools")),
            f"tool_choice {_brief(body.get('tool_choice'))}": bool(body.get("tool_choice")),
            f"answer as {form.get('type')}": bool(form),
            "after a tool": '"tool_call_id"' in str(json.dumps(body)) or '"tool_result"' in json.dumps(body),
        }
        return " ".join([self.route, ", ".join(name for name, is_so in told.items() if is_so)]).strip()


@dataclass(frozen=True, slots=True)
class Recording:
    """All that one version of a program sent."""

    program: str
    version: str
    how: How
    source: str = ""
    """Where the fields were read, of one that could not be run."""
    calls: list[Sent] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write a file with one call per line."""
        head = _lean({**asdict(self), "calls": ""})
        lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}," for name, value in head.items()]
        calls = [f"  {json.dumps(_lean(asdict(call)), ensure_ascii=False)}" for call in self.calls]
        path.write_text("\n".join(["{", *lines, ' "calls": [', ",\n".join(calls), " ]", "}", ""]))


def read(path: Path) -> Recording:
    document = json.loads(path.read_text())
    calls = [Sent(**{"headers": {}, "key": "bearer", **call}) for call in document.pop("calls")]
    return Recording(**document, calls=calls)


def recordings() -> dict[str, Recording]:
    """Return every recording by the name of its file, in the order of the programs' names."""
    found = {path.stem: read(path) for path in FOLDER.glob("*.json")}
    return dict(sorted(found.items(), key=lambda item: item[1].program.lower()))


def _brief(choice: Any) -> str:
    return choice if isinstance(choice, str) else str((choice or {}).get("type"))


def _lean(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value not in ("", None, {}) or name == "body"}
