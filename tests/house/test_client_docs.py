"""What the Python client has is told on its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway import client
from gateway.client import AnswerError, Client, ClientError
from gateway.client.parameters import ChatParameters, CompletionParameters
from gateway.commands import chat

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "client.md").read_text()


def test_every_parameter() -> None:
    section = PAGE.split("\n## Parameters\n")[1].split("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section)) - {"complete", "infill"}
    assert told == ChatParameters.__optional_keys__ | CompletionParameters.__optional_keys__


def test_every_error() -> None:
    kinds = {name for name in client.__all__ if isinstance(getattr(client, name), type)}
    errors = {name for name in kinds if issubclass(getattr(client, name), ClientError)} - {"ClientError"}
    section = PAGE.split("\n## Errors\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == errors
    properties = {name for name in dir(AnswerError("", status=None, detail={}, headers={})) if name.islower()}
    assert set(re.findall(r"`([a-z]\w+)`", section.split("`AnswerError`")[1].split("\n")[0])) <= properties


def names(one: object, before: str = "") -> set[str]:
    found = set()
    for name in dir(one):
        value = getattr(one, name)
        if not name.startswith("_"):
            found |= {before + name} if callable(value) else names(value, f"{before}{name}.")
    return found


def test_every_call() -> None:
    with Client() as made:
        calls = names(made) - {"close"}
    section = PAGE.split("\n## Calls\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`([\w.]+)\(", section)) == calls


@pytest.mark.parametrize("command", re.findall(r"^(/\w+)", chat.HELP, re.MULTILINE))
def test_every_word_of_a_chat(command: str) -> None:
    assert f"`{command}`" in PAGE


def test_every_flag_of_a_chat() -> None:
    flags = set(re.findall(r"--[\w-]+", chat.__doc__ or "")) - {"--help"}
    told = set(re.findall(r"--[\w-]+", PAGE + (DOCS / "settings.md").read_text()))
    assert flags <= told
    assert "| `paddock chat" in (DOCS / "settings.md").read_text()
