"""Turns a body's object into its model: reads other names, and sorts out parameters that are not read.

The latter are ignored because they change nothing here, or refused with a remedy. Nothing is dropped in silence: what
is ignored is noted, and the answer tells it. A refused parameter passes when it has a value that asks for nothing
(`harmless`), because many clients send every parameter they know. Each dialect has its own two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.api.parameters.base import synonyms_of
from gateway.api.parameters.faults import too_nested, translated
from gateway.errors import UnsupportedParameter
from gateway.telemetry.ignored import Ignored

BodyT = TypeVar("BodyT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Refusal:
    remedy: str
    harmless: tuple[Any, ...] = ()
    is_hint: bool = False
    """The answer means the same without the parameter: it is refused only where unknown parameters are."""


def read_body(
    kind: type[BodyT],
    document: dict[str, Any],
    unread: tuple[Mapping[str, str], Mapping[str, Refusal]],
    ignored: Ignored,
) -> BodyT:
    """Return the parsed body. `unread`: its dialect's tables of what is ignored and what is refused.

    Raises InvalidRequest and UnsupportedParameter, each naming the parameter by its path.
    """
    kept = _renamed(kind, sift(document, *unread, ignored), ignored)
    try:
        return kind.model_validate(kept, context=ignored)
    except ValidationError as error:
        raise translated(error) from None
    except RecursionError:
        raise too_nested() from None


def sift(
    document: dict[str, Any], known: Mapping[str, str], refused: Mapping[str, Refusal], ignored: Ignored
) -> dict[str, Any]:
    """Return the parameters that are read, and note the others. `known`: ignored parameters, with the reason.

    Null is "not given". Raises UnsupportedParameter for the first that is refused.
    """
    kept: dict[str, Any] = {}
    for name, value in document.items():
        if value is None:
            continue
        refusal = refused.get(name)
        if name in known:
            ignored.note(name)
        elif refusal is None:
            kept[name] = value
        elif _harmless(value, refusal.harmless):
            continue
        elif refusal.is_hint and not ignored.refuses:
            ignored.note(name)
        else:
            raise UnsupportedParameter(f"`{name}` is not supported with this value. {refusal.remedy}", param=name)
    return kept


def _renamed(kind: type[BaseModel], kept: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
    """Put values with another name under the body's own; of several names the first counts, as for llama-server.

    Raises UnsupportedParameter for a name that contradicts it, where ignored parameters are refused.
    """
    for name, others in synonyms_of(kind).items():
        for other in others:
            if other not in kept:
                continue
            value = kept.pop(other)
            if kept.setdefault(name, value) == value:
                continue
            if ignored.refuses:
                message = f"`{other}` is another name of `{name}`, and both have values. Send one of them."
                raise UnsupportedParameter(message, param=other)
            ignored.note(other)
    return kept


def _harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, so the types count as well.
    return any(value == other and type(value) is type(other) for other in harmless)
