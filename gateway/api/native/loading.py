"""`POST /models/load` and `POST /models/unload`: have a model's workers started, or drained and stopped, by the
supervisors that keep them.

Source: "Using multiple models" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from gateway.api.answers import send_json
from gateway.api.native.reception import Reception
from gateway.errors import InvalidRequest, NotSupported
from gateway.inquiries import Inquiries
from gateway.registry.model_wishes import ModelWishes


class LoadingRoute:
    """One of the two routes. Answers when the supervisors have been told: `GET /models` shows how far they are."""

    def __init__(self, reception: Reception, inquiries: Inquiries, wishes: ModelWishes, *, load: bool) -> None:
        self._reception = reception
        self._inquiries = inquiries
        self._wishes = wishes
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self._reception.admin(scope, "load and unload models")
        document = await self._reception.document(scope, receive)
        call = self._reception.call(caller, document, scope, strict=True)
        runs = any(not beat.draining for beat in self._inquiries.workers(call.model))
        # Workers follow a wish after a while: callers who change it meanwhile are not told that there is nothing to do.
        if runs == self._load and await self._wishes.is_unloaded(call.model) != self._load:
            state = "loaded already" if runs else "not loaded"
            raise InvalidRequest(f"The model `{call.alias}` is {state}.", param="model")
        if not await self._wishes.is_supervised(call.model):
            verb = "start" if self._load else "stop"
            raise NotSupported(
                f"No supervisor keeps workers of `{call.alias}`, so the gateway can't {verb} them. Run them under "
                f"`paddock up` or `paddock supervisor`, or {verb} them yourself.",
                param="model",
            )
        await self._wishes.want(call.model, self._load)
        await send_json(send, {"success": True}, caller.trail)
