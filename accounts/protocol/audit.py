"""An admin's action at a gateway, such as cancelling a call, in the form in which the accounts service audits it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

AUDITED_PATH = "/audited"
"""Of the accounts service. Gateways forward no path like it, so that only they can write there."""

Word = Annotated[str, Meta(min_length=1, max_length=64)]
Name = Annotated[str, Meta(max_length=256)]


class AuditedAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that an admin did; who it was is the request's caller."""

    action: Word
    """Such as `cancel`."""
    kind: Word
    """Such as `call`."""
    subject: Name
    team: Name = ""
    """The team that it belongs to; empty: none."""
    after: dict[str, Any] | None = None
