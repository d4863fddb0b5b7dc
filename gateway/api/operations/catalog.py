"""Answers `GET /admin/catalog` and `POST /admin/catalog/reload`: the catalog that this gateway uses, and its file."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.call import Principal
from gateway.catalog.live import LiveCatalog, told_of
from gateway.errors import CatalogRefused, NotSupported
from workers.models.catalog import CatalogError


class CatalogRoutes:
    """Handles the routes of the catalog, for this gateway process; the others follow the file by themselves."""

    def __init__(self, catalog: LiveCatalog) -> None:
        self._catalog = catalog

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the names in use, and what is wrong with the file if an older catalog is in use."""
        await send_json(send, self._told(), request_log_of(scope))

    async def reload(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the file now, and answer with what is different. Raises NotSupported, CatalogRefused."""
        if self._catalog.path is None:
            raise NotSupported("This gateway has no catalog. Start it with --catalog (PADDOCK_CATALOG).")
        try:
            changes = await self._catalog.reload()
        except CatalogError as error:
            raise CatalogRefused(f"{error} (the catalog before stays in use)") from None
        changed = {part: told_of(one) for part, one in changes.items()}
        await send_json(send, self._told() | {"changes": changed}, request_log_of(scope))

    def _told(self) -> dict[str, Any]:
        catalog, path = self._catalog, self._catalog.path
        return {
            "file": None if path is None else str(path),
            "taken_at": catalog.taken_at,
            "fault": catalog.fault or None,
            "models": sorted(catalog.names.models),
            "aliases": sorted(catalog.names.aliases),
        }
