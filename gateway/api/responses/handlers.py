"""Builds the handlers of the Responses routes for `gateway.app`."""

from __future__ import annotations

from gateway.access.control import AccessControl
from gateway.api.call_handlers import CallHandlers
from gateway.api.dialect import Handler
from gateway.api.http.sockets import Sockets
from gateway.api.responder import Responder
from gateway.api.responses.background import Background
from gateway.api.responses.create import CreateRoutes, Preparation
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.response_store import CHAIN_FACTOR, RecordStore, ResponseStore, ResponseWriters
from gateway.api.responses.socket.connection import Bounds, ResponsesSocket, SharedParts
from gateway.api.responses.socket.memory import Memories
from gateway.api.responses.stored import StoredResponses
from gateway.resume.recordings import Recordings
from gateway.telemetry.metrics import Metrics


def responses_handlers(
    calls: CallHandlers,
    access: AccessControl,
    recordings: Recordings,
    store: RecordStore,
    sockets: Sockets,
    memories: Memories,
    bounds: Bounds,
    metrics: Metrics,
) -> dict[str, Handler]:
    """Return name -> handler for the Responses routes. The names are those of `gateway.api.routes`."""
    responses = ResponseStore(store, CHAIN_FACTOR * calls.intake.max_body_bytes)
    preparation = Preparation(calls.resolver, calls.queries, calls.media)
    responder: Responder[ResponseRequest] = Responder(
        ResponseWriters(), calls.pipeline, calls.pings, calls.resumable, responses.conclude, repeats=True
    )
    background = Background(responder, recordings, calls.resumable, responses)
    new = CreateRoutes(calls, responses, responder, background, preparation)
    stored = StoredResponses(calls.intake, responses, background, recordings, calls.resumable)
    shared = SharedParts(calls, access, preparation, store, memories, metrics, bounds)
    return {
        "responses": new.create,
        "responses_socket": ResponsesSocket(shared, sockets).answer,
        "input_tokens": new.count_tokens,
        "response": stored.retrieve,
        "delete_response": stored.delete,
        "cancel_response": stored.cancel,
        "response_input": stored.input_items,
    }
