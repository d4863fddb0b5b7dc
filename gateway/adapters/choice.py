"""Chooses the LoRA adapters that a call uses.

llama-server's API numbers adapters: a number is an index into the model's adapters, sorted by name, and so changes when
adapters are added or removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from gateway.call import Call, Principal
from gateway.errors import InvalidRequest, PermissionDenied
from gateway.registry.snapshot import FleetView
from workers.protocol.requests import AdapterUse, GenerateRequest

MAX_NAMES_TOLD = 20


class AdapterScales(Protocol):
    def scales(self, model: str) -> Mapping[str, float]:
        """Return adapter -> default scale, for calls to the model that name no adapters."""
        ...


class CallAdapters:
    """Chooses the adapters of calls from those that the fleet has now."""

    def __init__(self, fleet: FleetView, scales: AdapterScales) -> None:
        self._fleet = fleet
        self._scales = scales

    def of(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        """Return the adapters to compute a call with. `asked`: the adapters that the request names.

        Raises InvalidRequest for an unknown adapter, PermissionDenied for an adapter that the key may not use."""
        scales = self._scales.scales(call.model)
        if not (asked or call.adapter or scales):
            return ()
        known = tuple(self._fleet.snapshot.contents.get(call.model, ()))
        return resolve_uses(asked, call.adapter, scales, known, call.principal)

    def apply(self, call: Call, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the adapters to compute it with. Raises what `of` raises."""
        uses = self.of(call, request.adapters)
        return request if uses == request.adapters else replace(request, adapters=uses)


def resolve_uses(
    asked: Sequence[AdapterUse], called: str, scales: Mapping[str, float], known: Sequence[str], principal: Principal
) -> tuple[AdapterUse, ...]:
    """Return the adapters to compute a call with: those `asked` for, and `called`, which the call names as its model.

    The key must allow each adapter whose scale is not 0. A call that names no adapter gets the model's default
    `scales`, which the operator sets for every key. Raises InvalidRequest, PermissionDenied."""
    if not asked and not called:
        return tuple(AdapterUse(name, scale) for name, scale in sorted(scales.items()) if scale and name in known)
    uses = tuple(_permit(use, known, principal) for use in asked)
    if called and all(use.name != called for use in uses):
        uses = (AdapterUse(called), *uses)
    return uses


def visible_adapters(known: Sequence[str], principal: Principal) -> list[str]:
    """Return the adapters that a key may see."""
    return [name for name in known if principal.admin or principal.may_use(name)]


def adapters_of(asked: Sequence[AdapterUse], known: Sequence[str]) -> list[str]:
    """Return the names of the adapters that a request turns on, also if it names them by number."""
    return [_known_name(use.name, known) or use.name for use in asked if use.scale]


def find_adapter(wanted: str, known: Sequence[str], principal: Principal) -> str:
    """Return the adapter of this name or number. Raises InvalidRequest, which lists the adapters the key may use."""
    name = _known_name(wanted, known)
    if not name:
        raise InvalidRequest(
            f"`lora` names {wanted[:128]!r}, which is no adapter here. {_list_usable(known, principal)}", param="lora"
        )
    return name


def _known_name(wanted: str, known: Sequence[str]) -> str:
    """Return the adapter of this name or number; empty: there is none."""
    if wanted in known:
        return wanted
    if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 and int(wanted) < len(known):
        return known[int(wanted)]
    return ""


def _permit(use: AdapterUse, known: Sequence[str], principal: Principal) -> AdapterUse:
    """Return `use`, with its adapter's number replaced by the name. Raises InvalidRequest for an unknown adapter.

    Raises PermissionDenied if the key may not use the adapter, unless its scale is 0, which turns the adapter off."""
    name = find_adapter(use.name, known, principal)
    if use.scale and not principal.may_use(name):
        # The error repeats what was sent, so that a number does not reveal its adapter's name.
        message = f"This API key may not use the adapter {use.name[:128]!r}. {_list_usable(known, principal)}"
        raise PermissionDenied(message, param="lora")
    return AdapterUse(name, use.scale)


def _list_usable(known: Sequence[str], principal: Principal) -> str:
    usable = visible_adapters(known, principal)
    names = ", ".join(f"`{name}`" for name in usable[:MAX_NAMES_TOLD])
    if names:
        return f"There are: {names}."
    if known:
        return "There is none that this key may use; ask the operator to add its name to the key's `aliases`."
    return "There are: none; load one first."
