"""Answers the routes of `/admin/catalog`: the catalog that this gateway uses, its file, and changes of that."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.body import read_body
from gateway.api.overview.calls import AuditNote
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.catalog.editing import MAX_TEXT_BYTES, CatalogEditing
from gateway.catalog.live import LiveCatalog, told_of
from gateway.errors import CatalogRefused, InvalidRequest, NotSupported
from workers.models.catalog import CatalogError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 6 * MAX_TEXT_BYTES + 4096
"""Of a text as JSON, in which a character can take six bytes."""

Text = Annotated[str, Meta(max_length=MAX_TEXT_BYTES)]


class CheckedText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /admin/catalog/check`."""

    text: Text


class WrittenText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `PUT /admin/catalog`."""

    text: Text
    digest: str
    """As `GET /admin/catalog?text=true` told it."""


_decode_checked = msgspec.json.Decoder(CheckedText).decode
_decode_written = msgspec.json.Decoder(WrittenText).decode


class CatalogRoutes:
    """Handles the routes of the catalog, for this gateway process; the others follow the file by themselves."""

    def __init__(self, catalog: LiveCatalog, note: AuditNote) -> None:
        self._catalog = catalog
        self._editing = CatalogEditing(catalog)
        self._note = note

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the names in use, and what is wrong with the file if an older catalog is in use; with
        `?text=true` also the file's contents. Raises NotSupported."""
        told = self._told()
        if query_of(scope).get("text") == "true":
            file = await asyncio.to_thread(self._editing.read)
            told |= {"text": file.text, "digest": file.digest, "unwritable": file.unwritable or None}
        await send_json(send, told, request_log_of(scope))

    async def check(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with what is wrong with a text, and what it would change. Raises InvalidRequest, NotSupported."""
        try:
            asked = _decode_checked(await read_body(scope, receive, MAX_BODY_BYTES))
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f'Send {{"text": "..."}} with a catalog: {error}.', param="text") from None
        found = await asyncio.to_thread(self._editing.check, asked.text)
        await send_json(send, {"faults": found.faults, "changes": found.changes}, request_log_of(scope))

    async def write(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the file anew, use it, and answer with what is different. Raises InvalidRequest, CatalogRefused,
        CatalogChanged, NotSupported."""
        try:
            asked = _decode_written(await read_body(scope, receive, MAX_BODY_BYTES))
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f'Send {{"text": "...", "digest": "..."}}: {error}.', param="text") from None
        await asyncio.to_thread(self._editing.write, asked.text, asked.digest)
        path = str(self._catalog.path)
        log.warning("an admin wrote the catalog", extra={"fields": {"by": principal.key_id, "file": path}})
        changed = await self._reloaded()
        audited = await self._note(principal, scope, "write", "catalog", path[-256:], "", {"changes": changed})
        await send_json(send, self._told() | {"changes": changed, "audited": audited}, request_log_of(scope))

    async def reload(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the file now, and answer with what is different. Raises NotSupported, CatalogRefused."""
        if self._catalog.path is None:
            raise NotSupported("This gateway has no catalog. Start it with --catalog (PADDOCK_CATALOG).")
        changed = await self._reloaded()
        await send_json(send, self._told() | {"changes": changed}, request_log_of(scope))

    async def _reloaded(self) -> dict[str, Any]:
        """Read the file, and return what is different. Raises CatalogRefused."""
        try:
            changes = await self._catalog.reload()
        except CatalogError as error:
            raise CatalogRefused(f"{error} (the catalog before stays in use)") from None
        return {part: told_of(one) for part, one in changes.items()}

    def _told(self) -> dict[str, Any]:
        catalog, path = self._catalog, self._catalog.path
        return {
            "file": None if path is None else str(path),
            "taken_at": catalog.taken_at,
            "fault": catalog.fault or None,
            "models": sorted(catalog.names.models),
            "aliases": sorted(catalog.names.aliases),
        }
