"""Builds the handlers of the Responses routes, by the names of their rows."""

from __future__ import annotations

from gateway.access.control import AccessControl
from gateway.api.answering import Answering
from gateway.api.dialect import Handler
from gateway.api.http.sockets import Sockets
from gateway.api.http.streaming import Pings
from gateway.api.intake.intake import Intake
from gateway.api.responses.background import Background
from gateway.api.responses.create import CreateResponse, InputTokens, Preparation, Truncation
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.shelf import CHAIN_FACTOR, ResponseWriters, Shelf, Store
from gateway.api.responses.socket.connection import Bounds, ResponsesSocket, Rooms
from gateway.api.responses.socket.memory import Memories
from gateway.api.responses.stored import StoredResponses
from gateway.api.resumable import Resumable
from gateway.dispatch.pipeline import Pipeline
from gateway.relay.relay import WorkerQueries
from gateway.resume.recordings import Recordings
from gateway.telemetry.metrics import Metrics


def responses_handlers(
    access: AccessControl,
    pipeline: Pipeline,
    intake: Intake,
    pings: Pings,
    resumable: Resumable,
    recordings: Recordings,
    store: Store,
    queries: WorkerQueries,
    sockets: Sockets,
    memories: Memories,
    bounds: Bounds,
    metrics: Metrics,
) -> dict[str, Handler]:
    shelf, truncation = Shelf(store, CHAIN_FACTOR * intake.max_body_bytes), Truncation(queries)
    preparation = Preparation(pipeline, truncation)
    answering: Answering[ResponseRequest] = Answering(
        ResponseWriters(), pipeline, pings, resumable, shelf.conclude, repeats=True
    )
    background = Background(answering, recordings, resumable, shelf)
    stored = StoredResponses(intake, shelf, background, recordings, resumable)
    rooms = Rooms(access, pipeline, intake, preparation, resumable, store, memories, metrics, pings, bounds)
    return {
        "responses": CreateResponse(intake, resumable, shelf, answering, background, preparation),
        "responses_socket": ResponsesSocket(rooms, sockets),
        "input_tokens": InputTokens(pipeline, intake, shelf, queries),
        "response": stored.retrieve,
        "delete_response": stored.delete,
        "cancel_response": stored.cancel,
        "response_input": stored.input_items,
    }
