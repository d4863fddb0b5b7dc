"""Parameters that are not read: ignored because they change nothing here, or refused with a remedy.

Nothing is dropped in silence that would change an answer. A refused parameter passes when it has a value that asks
for nothing (`harmless`), because many clients send every parameter they know. Each dialect has its own two tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class Refusal:
    remedy: str
    harmless: tuple[Any, ...] = ()


def sift(document: dict[str, Any], ignored: Mapping[str, str], refused: Mapping[str, Refusal]) -> dict[str, Any]:
    """The parameters that are read. Raises UnsupportedParameter for the first that is refused; null is 'not given'."""
    kept: dict[str, Any] = {}
    for name, value in document.items():
        if value is None or name in ignored:
            continue
        refusal = refused.get(name)
        if refusal is None:
            kept[name] = value
        elif not _harmless(value, refusal.harmless):
            raise UnsupportedParameter(f"`{name}` is not supported with this value. {refusal.remedy}", param=name)
    return kept


def _harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, so the types count as well.
    return any(value == other and type(value) is type(other) for other in harmless)
