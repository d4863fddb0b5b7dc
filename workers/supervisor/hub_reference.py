"""The name of a model of the Hugging Face hub: `OWNER/NAME[:QUANT][@REVISION]`."""

from __future__ import annotations

import re
from typing import NamedTuple

COMMIT = re.compile(r"[0-9a-f]{40}")


class HubReference(NamedTuple):
    repo: str
    quant: str = ""
    """The quantisation, part of a file's name; empty: the preferred one that is there."""
    revision: str = ""
    """Branch, tag or commit; empty: the newest."""

    @property
    def is_pinned(self) -> bool:
        """Whether the reference names one commit, so that it means the same files for ever."""
        return COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        quant, revision = f":{self.quant}" if self.quant else "", f"@{self.revision}" if self.revision else ""
        return self.repo + quant + revision


def parsed(text: str) -> HubReference:
    """Return the parts of a reference; they are checked only when the hub is asked."""
    rest, _, revision = text.partition("@")
    repo, _, quant = rest.partition(":")
    return HubReference(repo, quant, revision)
