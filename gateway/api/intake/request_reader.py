"""Reads requests of routes whose calls wait for no slot: their bodies, and the models that they name."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.body import read_object
from gateway.api.intake.intake import Intake
from gateway.api.parameters.base import nesting_error, translate_error
from gateway.api.request_headers import named_model
from gateway.call import Call, Principal
from gateway.dispatch.call_resolver import CallResolver
from gateway.telemetry.request_log import Ignored

BodyT = TypeVar("BodyT", bound=BaseModel)


class RequestReader:
    """Reads the bodies of requests and the models that they name."""

    def __init__(self, resolver: CallResolver, intake: Intake) -> None:
        self.intake = intake
        self._resolver = resolver

    async def document(self, principal: Principal, scope: Scope, receive: Receive) -> dict[str, Any]:
        """Return a small JSON body as a dict, empty if there is no body. Raises what `Intake.small` raises."""
        return await self.intake.small(principal, scope, receive, document_of)

    def begin(self, principal: Principal, scope: Scope) -> None:
        """Begin a call before its body is read, as `CallResolver.begin` does; the query may name its model."""
        self._resolver.begin(principal, request_log_of(scope), model=named_model({}, scope))

    def call(self, principal: Principal, document: dict[str, Any], scope: Scope, *, strict: bool = False) -> Call:
        """Return a call to the model that the body names, or else the query string, or else the default model.

        `strict`: as in `ModelNames.resolve_call`, for routes that change a model for all callers. Raises what
        `CallResolver.resolve` raises."""
        return self._resolver.resolve(principal, named_model(document, scope), request_log_of(scope), strict=strict)


def document_of(raw: bytes) -> dict[str, Any]:
    """Return a JSON body as a dict, empty if there is no body. Raises InvalidRequest."""
    return read_object(raw) if raw.strip() else {}


def validated(kind: type[BodyT], document: dict[str, Any], ignored: Ignored) -> BodyT:
    """Return the parsed body. Fields with null count as not sent; unknown fields are noted in `ignored`.

    Raises InvalidRequest, UnsupportedParameter."""
    given = {name: value for name, value in document.items() if value is not None}
    try:
        return kind.model_validate(given, context=ignored)
    except ValidationError as error:
        raise translate_error(error) from None
    except RecursionError:
        raise nesting_error() from None
