"""Answers llama-server's `POST /models` and `DELETE /models`: downloads a model of the hub, removes its files.

Supervisors do that, on their machines; `GET /models/sse` tells how far a download is. Source: "POST /models" and
"DELETE /models" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.request_reader import RequestReader
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.errors import InvalidRequest, ModelNotFound, NotSupported, Unavailable
from gateway.registry.libraries import Libraries
from workers.protocol.residency import MAX_REFERENCE_CHARS, Action, LibraryAnswer

NO_MACHINE = (
    "No supervisor takes orders for its models folder. Run `paddock up` or `paddock supervisor`, or download the model "
    "yourself with `paddock models pull`."
)


EVERY = "*"
"""Stands for all machines."""


class ModelFiles:
    """Handles downloads and removals of models."""

    def __init__(self, reader: RequestReader, libraries: Libraries) -> None:
        self._reader = reader
        self._libraries = libraries

    async def download(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a model of the hub downloaded, and answer when that has begun."""
        document = await self._reader.document(principal, scope, receive)
        model, machine = _text(document.get("model"), "model"), document.get("machine")
        done = await self._order("fetch", model, _text(machine, "machine") if machine is not None else "")
        await send_json(send, done, request_log_of(scope))

    async def remove(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Stop a model's download or else remove its files, and answer when that is done."""
        query = query_of(scope)
        model = scope.get("path_params", {}).get("model") or query.get("model", "")
        done = await self._order("remove", _text(model, "model"), query.get("machine", ""))
        await send_json(send, done, request_log_of(scope))

    async def _order(self, action: Action, model: str, machine: str) -> dict[str, object]:
        """Have one machine, or all (`EVERY`), carry out an order; return the body of the answer. Raises InvalidRequest,
        ModelNotFound, NotSupported, Unavailable, StoreUnavailable."""
        machines = await self._libraries.machines()
        if not machines:
            raise NotSupported(NO_MACHINE)
        names = ", ".join(machines)
        if not machine and len(machines) > 1:
            raise InvalidRequest(
                f"Several machines have models folders. Name one (`machine`), or {EVERY} for all: {names}.",
                param="machine",
            )
        if machine not in ("", EVERY, *machines):
            raise InvalidRequest(f"No machine {machine[:100]!r} takes orders. Name one of: {names}.", param="machine")
        is_for_all = machine == EVERY
        wanted = [*machines] if is_for_all else [machine or next(iter(machines))]
        outcome = _Outcome.of(await self._libraries.order(wanted, action, model))
        if error := outcome.error():
            raise error
        return {"success": True, "machines": outcome.done} if is_for_all else {"success": True}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Tells which machines did what an order asked."""

    done: list[str]
    """The machines that have done it, or begun."""
    missing: dict[str, str]
    """Machine -> why it does not have the model."""
    refused: dict[str, str]
    """Machine -> why it does not do it."""
    silent: list[str]
    """The machines that gave no answer."""

    @classmethod
    def of(cls, answers: Mapping[str, LibraryAnswer | None]) -> _Outcome:
        given = {machine: answer for machine, answer in answers.items() if answer is not None}
        return cls(
            [machine for machine, answer in given.items() if not answer.refusal],
            {machine: answer.refusal for machine, answer in given.items() if answer.refusal and answer.is_missing},
            {machine: answer.refusal for machine, answer in given.items() if answer.refusal and not answer.is_missing},
            [machine for machine, answer in answers.items() if answer is None],
        )

    def error(self) -> ModelNotFound | InvalidRequest | Unavailable | None:
        """Return the error to answer with; None: it is done wherever there was something to do."""
        told = f" It is done on {', '.join(self.done)}." if self.done else ""
        if self.refused:
            return InvalidRequest(self._sentences(self.refused) + told, param="model")
        if self.silent:
            names = ", ".join(self.silent)
            return Unavailable(f"The supervisor of {names} did not answer. Send the request again.{told}")
        return None if self.done else ModelNotFound(self._sentences(self.missing))

    def _sentences(self, refusals: Mapping[str, str]) -> str:
        """Return refusals as sentences, which name their machines if several were asked."""
        is_one = len(self.done) + len(self.missing) + len(self.refused) + len(self.silent) == 1
        sentences = []
        for machine, refusal in refusals.items():
            text = refusal
            if not refusal.startswith(machine):
                text = f"{refusal[:1].upper()}{refusal[1:]}" if is_one else f"{machine}: {refusal}"
            sentences.append(f"{text}.".replace("..", "."))
        return " ".join(sentences)


def _text(value: object, name: str) -> str:
    """Return a name of the request. Raises InvalidRequest."""
    if not isinstance(value, str) or not value or len(value) > MAX_REFERENCE_CHARS:
        raise InvalidRequest(
            f"`{name}` must be a text of 1 to {MAX_REFERENCE_CHARS} characters, such as owner/name:Q4_K_M.", param=name
        )
    return value
