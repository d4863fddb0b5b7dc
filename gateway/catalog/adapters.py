"""Which LoRA adapters a call uses. Pure.

llama-server's numbers are places in the list of a model's adapters, which are sorted by name: they move when adapters
come and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.errors import InvalidRequest
from workers.protocol.requests import AdapterUse

MAX_NAMES_TOLD = 20


def uses_of(
    asked: Sequence[AdapterUse], called: str, scales: Mapping[str, float], known: Sequence[str]
) -> tuple[AdapterUse, ...]:
    """What a call computes with: the adapters that it asked for and the one that it called as `model`.

    A call that did neither gets the model's default `scales`. Raises InvalidRequest.
    """
    if not asked and not called:
        return tuple(AdapterUse(name, scale) for name, scale in sorted(scales.items()) if scale and name in known)
    uses = tuple(AdapterUse(named(use.name, known), use.scale) for use in asked)
    if called and all(use.name != called for use in uses):
        uses = (AdapterUse(called), *uses)
    return uses


def named(wanted: str, known: Sequence[str]) -> str:
    """The adapter of this name or number. Raises InvalidRequest."""
    if wanted in known:
        return wanted
    if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 and int(wanted) < len(known):
        return known[int(wanted)]
    told = ", ".join(f"`{name}`" for name in known[:MAX_NAMES_TOLD]) or "none; load one first"
    raise InvalidRequest(f"`lora` names {wanted[:128]!r}, which is no adapter here. There are: {told}.", param="lora")
