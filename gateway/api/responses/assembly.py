"""Builds the apps of the Responses routes, by the names of their rows."""

from __future__ import annotations

from starlette.types import ASGIApp

from gateway.access.keys import Keys
from gateway.api.answering import Answering
from gateway.api.intake import Intake
from gateway.api.responses.background import Background
from gateway.api.responses.connection import Bounds, Rooms
from gateway.api.responses.create import CreateResponse
from gateway.api.responses.input_tokens import InputTokens
from gateway.api.responses.memory import Memories
from gateway.api.responses.preparation import Preparation
from gateway.api.responses.request import ResponseRequest
from gateway.api.responses.shelf import CHAIN_FACTOR, ResponseWriters, Shelf, Store
from gateway.api.responses.socket import ResponsesSocket
from gateway.api.responses.stored import Endpoint, StoredResponses
from gateway.api.responses.truncation import Truncation
from gateway.api.resumable import Resumable
from gateway.api.sockets import Sockets
from gateway.api.streaming import Pings
from gateway.inquiries import Inquiries
from gateway.pipeline import Pipeline
from gateway.resume.recordings import Recordings
from gateway.telemetry.metrics import Metrics


def responses_apps(
    keys: Keys,
    pipeline: Pipeline,
    intake: Intake,
    pings: Pings,
    resumable: Resumable,
    recordings: Recordings,
    store: Store,
    inquiries: Inquiries,
    sockets: Sockets,
    memories: Memories,
    bounds: Bounds,
    metrics: Metrics,
) -> dict[str, ASGIApp]:
    shelf, truncation = Shelf(store, CHAIN_FACTOR * intake.max_body_bytes), Truncation(inquiries)
    preparation = Preparation(pipeline, truncation)
    answering: Answering[ResponseRequest] = Answering(
        ResponseWriters(), pipeline, pings, resumable, shelf.conclude, repeats=True
    )
    background = Background(answering, recordings, resumable, shelf)
    stored = StoredResponses(keys, intake, shelf, background, recordings, resumable)
    rooms = Rooms(keys, pipeline, intake, preparation, resumable, store, memories, metrics, pings, bounds)
    return {
        "responses": CreateResponse(keys, intake, resumable, shelf, answering, background, preparation),
        "responses_socket": ResponsesSocket(rooms, sockets),
        "input_tokens": InputTokens(keys, pipeline, intake, shelf, inquiries),
        "response": Endpoint(stored.retrieve),
        "delete_response": Endpoint(stored.delete),
        "cancel_response": Endpoint(stored.cancel),
        "response_input": Endpoint(stored.input_items),
    }
