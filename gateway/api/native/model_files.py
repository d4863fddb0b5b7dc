"""Answers llama-server's `POST /models` and `DELETE /models`: downloads a model of the hub, removes its files.

Supervisors do that, on their machines; `GET /models/sse` tells how far a download is. Source: "POST /models" and
"DELETE /models" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.request_reader import RequestReader
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.errors import InvalidRequest, ModelNotFound, NotSupported, Unavailable
from gateway.registry.libraries import Libraries
from workers.protocol.residency import MAX_REFERENCE_CHARS, Action

NO_MACHINE = (
    "No supervisor takes orders for its models folder. Run `paddock up` or `paddock supervisor`, or download the model "
    "yourself with `paddock models pull`."
)


class ModelFiles:
    """Handles downloads and removals of models."""

    def __init__(self, reader: RequestReader, libraries: Libraries) -> None:
        self._reader = reader
        self._libraries = libraries

    async def download(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a model of the hub downloaded, and answer when that has begun."""
        document = await self._reader.document(principal, scope, receive)
        model, machine = _text(document.get("model"), "model"), document.get("machine")
        await self._order("fetch", model, _text(machine, "machine") if machine is not None else "")
        await send_json(send, {"success": True}, request_log_of(scope))

    async def remove(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Stop a model's download or else remove its files, and answer when that is done."""
        query = query_of(scope)
        model = scope.get("path_params", {}).get("model") or query.get("model", "")
        await self._order("remove", _text(model, "model"), query.get("machine", ""))
        await send_json(send, {"success": True}, request_log_of(scope))

    async def _order(self, action: Action, model: str, machine: str) -> None:
        """Have one machine carry out an order. Raises InvalidRequest, ModelNotFound, NotSupported, Unavailable,
        StoreUnavailable."""
        machines = await self._libraries.machines()
        if not machines:
            raise NotSupported(NO_MACHINE)
        if not machine and len(machines) > 1:
            names = ", ".join(machines)
            raise InvalidRequest(
                f"Several machines have models folders. Name one (`machine`): {names}.", param="machine"
            )
        machine = machine or next(iter(machines))
        if machine not in machines:
            names = ", ".join(machines)
            raise InvalidRequest(f"No machine {machine[:100]!r} takes orders. Name one of: {names}.", param="machine")
        answer = await self._libraries.order(machine, action, model)
        if answer is None:
            raise Unavailable(f"The supervisor of {machine} did not answer. Send the request again.")
        if answer.refusal:
            text = f"{answer.refusal[:1].upper()}{answer.refusal[1:]}.".replace("..", ".")
            raise ModelNotFound(text) if answer.is_missing else InvalidRequest(text, param="model")


def _text(value: object, name: str) -> str:
    """Return a name of the request. Raises InvalidRequest."""
    if not isinstance(value, str) or not value or len(value) > MAX_REFERENCE_CHARS:
        raise InvalidRequest(
            f"`{name}` must be a text of 1 to {MAX_REFERENCE_CHARS} characters, such as owner/name:Q4_K_M.", param=name
        )
    return value
