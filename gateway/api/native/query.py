"""Reads the query of a request's address."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Scope

from gateway.api.parameters.faults import shown
from gateway.errors import InvalidRequest

MAX_FIELDS = 32


def query_of(scope: Scope) -> dict[str, str]:
    """Return the parameters of the query. Raises InvalidRequest."""
    try:
        pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"The address has more than {MAX_FIELDS} parameters. Send fewer.") from None
    return dict(pairs)


def named_model(document: dict[str, Any], scope: Scope) -> str:
    """Return `model` of the body, else of the query; empty where neither names one. Raises InvalidRequest."""
    name = document.get("model")
    if name is None:
        return query_of(scope).get("model", "")
    if not isinstance(name, str):
        raise InvalidRequest(f"`model` is {shown(name)}. Send a string.", param="model")
    return name
