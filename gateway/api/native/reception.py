"""Begins a route that is answered at once: finds the caller, the question and the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from gateway.access.keys import Keys
from gateway.api.body import read_object
from gateway.api.caller import identified
from gateway.api.intake import Body, Intake
from gateway.api.native.query import named_model
from gateway.api.parameters.faults import too_nested, translated
from gateway.call import Call, Principal
from gateway.errors import PermissionDenied
from gateway.pipeline import Fleet, Pipeline
from gateway.telemetry.ignored import Ignored
from gateway.telemetry.trail import Trail

BodyT = TypeVar("BodyT", bound=BaseModel)
SmallT = TypeVar("SmallT")


@dataclass(frozen=True, slots=True)
class Caller:
    principal: Principal
    trail: Trail


class Reception:
    """Identifies callers, and reads their bodies and the models that they name."""

    def __init__(self, keys: Keys, pipeline: Pipeline, fleet: Fleet, intake: Intake) -> None:
        self._keys = keys
        self._pipeline = pipeline
        self._fleet = fleet
        self._intake = intake

    async def caller(self, scope: Scope) -> Caller:
        """Return the caller. Raises AuthenticationFailed."""
        principal, trail = await identified(self._keys, scope)
        return Caller(principal, trail)

    async def admin(self, scope: Scope, what: str) -> Caller:
        """Return the caller, an admin who wants to do `what`. Raises AuthenticationFailed, PermissionDenied."""
        caller = await self.caller(scope)
        if not caller.principal.admin:
            raise PermissionDenied(f"Only an admin's API key may {what}. Ask the operator.")
        return caller

    def opened(self, caller: Caller, scope: Scope, receive: Receive) -> AbstractAsyncContextManager[Body]:
        """Read a body that may be large. Raises as `Intake.opened`."""
        return self._intake.opened(caller.principal, scope, receive)

    async def small(self, scope: Scope, receive: Receive, read: Callable[[bytes], SmallT]) -> SmallT:
        """Read a body that holds no prompt. Raises as `Intake.small`."""
        return await self._intake.small(scope, receive, read)

    async def document(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        """Return a small body as an object, an empty one where nothing is sent. Raises InvalidRequest."""
        return await self.small(scope, receive, document_of)

    def adapter_model(self, adapter: str) -> str:
        """Return the model of an adapter; empty where it is not known, or several models have one of the name."""
        return self._fleet.snapshot.adapters.get(adapter, "")

    def call(self, caller: Caller, document: dict[str, Any], scope: Scope, *, strict: bool = False) -> Call:
        """Return a call of the model that is named in the body or the address, else of the default one.

        `strict`: for what changes a model for everybody, see `Names.named`. Raises as `Pipeline.call`.
        """
        return self._pipeline.call(caller.principal, named_model(document, scope), caller.trail, strict=strict)


def document_of(raw: bytes) -> dict[str, Any]:
    """Return the body as an object, an empty one where nothing is sent. Raises InvalidRequest."""
    return read_object(raw) if raw.strip() else {}


def validated(kind: type[BodyT], document: dict[str, Any], ignored: Ignored) -> BodyT:
    """Return the parsed body; `ignored` notes names that it does not have. Null is "not given".

    Raises InvalidRequest, UnsupportedParameter.
    """
    given = {name: value for name, value in document.items() if value is not None}
    try:
        return kind.model_validate(given, context=ignored)
    except ValidationError as error:
        raise translated(error) from None
    except RecursionError:
        raise too_nested() from None
