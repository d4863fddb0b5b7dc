"""`GET /props` and `POST /props`: what a model is and how it is served.

Source of the names: `get_res_props` in tools/server/server-context.cpp of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.api.answers import send_json
from gateway.api.generation_settings import default_settings
from gateway.api.native.reception import Reception
from gateway.errors import NotSupported
from gateway.inquiries import Inquiries
from workers.protocol.text import PROPS_PATH, Props, decode_props

TOOL_TEMPLATE = "tool_use"
MODALITIES = {"vision": "image", "video": "video", "audio": "audio"}


@dataclass(frozen=True, slots=True)
class Offered:
    """Routes that an operator may switch off."""

    slots: bool = True
    metrics: bool = True


class PropsRoute:
    """Answers both routes."""

    def __init__(self, reception: Reception, inquiries: Inquiries, offered: Offered) -> None:
        self._offered = offered
        self._reception = reception
        self._inquiries = inquiries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await self._change(scope, receive, send)
            return
        caller = await self._reception.caller(scope)
        call = self._reception.call(caller, {}, scope)
        found = await self._inquiries.of_model(call.model, "GET", PROPS_PATH, decode_props)
        num_slots = sum(beat.slots for beat in self._inquiries.workers(call.model))
        await send_json(send, props_object(found, call.alias, num_slots, self._offered), caller.trail)

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse any property. As in llama-server, there is none yet that could be changed. Raises NotSupported."""
        caller = await self._reception.admin(scope, "change properties")
        document = await self._reception.document(scope, receive)
        self._reception.call(caller, document, scope)
        names = sorted(name for name in document if name != "model")
        if names:
            raise NotSupported(
                f"`{names[0][:100]}` can't be changed while a model runs. Set `sampling` and what else there is in the "
                "catalog, and restart the model's workers."
            )
        await send_json(send, {"success": True}, caller.trail)


def props_object(found: Props, name: str, num_slots: int, offered: Offered) -> dict[str, Any]:
    """Return the properties. `num_slots`: slots of all the model's workers."""
    document = {
        "default_generation_settings": {"params": default_settings(found.sampling), "n_ctx": found.n_ctx},
        "total_slots": num_slots,
        "model_alias": name,
        "model_ftype": found.ftype,
        "model_path": found.model_file,
        "modalities": {kind: word in found.input_modalities for kind, word in MODALITIES.items()},
        "endpoint_slots": offered.slots,
        "endpoint_props": False,
        "endpoint_metrics": offered.metrics,
        "ui": False,
        "ui_settings": {},
        "chat_template": found.chat_templates.get("default", ""),
        "chat_template_caps": found.chat_template_caps,
        "bos_token": found.bos_token,
        "eos_token": found.eos_token,
        "build_info": found.build_info,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }
    tools = found.chat_templates.get(TOOL_TEMPLATE)
    return document | ({"chat_template_tool_use": tools} if tools else {})
