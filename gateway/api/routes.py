"""Every route of the gateway, declared once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.anthropic.error_shape import ANTHROPIC
from gateway.api.dialect import ROUTE, SHAPE, ErrorShape
from gateway.api.native.error_shape import NATIVE
from gateway.api.openai.error_shape import COMPLETIONS, OPENAI, RESPONSES
from gateway.api.sockets import METHOD
from gateway.errors import MethodNotAllowed, NotFound
from workers.protocol.drain import DRAIN_PATH


class RouteRow(NamedTuple):
    method: str
    path: str
    name: str
    """Name of the app that answers; several routes may have the same."""
    about: str
    shape: ErrorShape = OPENAI
    """The form of its errors."""


ROUTES = (
    RouteRow("POST", "/v1/chat/completions", "chat", "an answer to a conversation, streamed or whole"),
    RouteRow("POST", "/chat/completions", "chat", "the same, where clients of llama-server may look for it"),
    RouteRow("POST", "/v1/chat/completions/input_tokens", "chat_input_tokens", "how many tokens it would have"),
    RouteRow("POST", "/chat/completions/input_tokens", "chat_input_tokens", "the same"),
    RouteRow(
        "POST",
        "/v1/completions",
        "completion",
        "prompts that are continued as they are, streamed or whole",
        COMPLETIONS,
    ),
    RouteRow("POST", "/v1/embeddings", "embeddings", "vectors of texts"),
    RouteRow("POST", "/v1/rerank", "rerank", "documents by how well they fit a query"),
    RouteRow("POST", "/v1/reranking", "rerank", "the same"),
    RouteRow("POST", "/rerank", "rerank", "the same"),
    RouteRow("POST", "/reranking", "rerank", "the same"),
    RouteRow(
        "POST",
        "/v1/responses",
        "responses",
        "an answer in typed items, whole, streamed or in the background",
        RESPONSES,
    ),
    RouteRow(
        METHOD, "/v1/responses", "responses_socket", "the same over a WebSocket, request after request", RESPONSES
    ),
    RouteRow("POST", "/responses", "responses", "the same, where clients of llama-server may look for it", RESPONSES),
    RouteRow("POST", "/v1/responses/input_tokens", "input_tokens", "how many tokens a request would have", RESPONSES),
    RouteRow("POST", "/responses/input_tokens", "input_tokens", "the same", RESPONSES),
    RouteRow("POST", "/v1/responses/compact", "compact", "not served; says what to do instead"),
    RouteRow("GET", "/v1/responses/{response_id}", "response", "a stored response, or the events of one that is made"),
    RouteRow("DELETE", "/v1/responses/{response_id}", "delete_response", "forgets it"),
    RouteRow("POST", "/v1/responses/{response_id}/cancel", "cancel_response", "ends a response in the background"),
    RouteRow("GET", "/v1/responses/{response_id}/input_items", "response_input", "what it was asked"),
    RouteRow("POST", "/v1/conversations", "conversations", "not served; says what to do instead"),
    RouteRow("POST", "/v1/moderations", "moderations", "not served; says what to do instead"),
    RouteRow("POST", "/v1/audio/transcriptions", "transcriptions", "not served; says what to do instead"),
    RouteRow("POST", "/audio/transcriptions", "transcriptions", "the same", NATIVE),
    RouteRow("POST", "/v1/chat/completions/control", "control", "not served; says what to do instead", NATIVE),
    RouteRow("GET", "/v1/stream", "streams", "not served; says what to do instead", NATIVE),
    RouteRow("DELETE", "/v1/stream", "streams", "the same", NATIVE),
    RouteRow("POST", "/v1/streams/lookup", "streams", "the same", NATIVE),
    RouteRow("GET", "/tools", "agent_tools", "not served; says what to do instead", NATIVE),
    RouteRow("POST", "/tools", "agent_tools", "the same", NATIVE),
    RouteRow("POST", "/models", "model_files", "not served; says what to do instead", NATIVE),
    RouteRow("DELETE", "/models", "model_files", "the same", NATIVE),
    RouteRow("GET", "/models/sse", "model_news", "not served; says what to do instead", NATIVE),
    RouteRow("POST", "/v1/messages", "messages", "an answer in Anthropic's form, streamed or whole", ANTHROPIC),
    RouteRow("POST", "/v1/messages/count_tokens", "count_tokens", "how many tokens a conversation has", ANTHROPIC),
    RouteRow("GET", "/v1/models", "models", "the models that the key may use"),
    RouteRow("GET", "/v1/models/{model:path}", "model", "one of them"),
    RouteRow("POST", "/completion", "native_completion", "prompts that are continued, in llama-server's form", NATIVE),
    RouteRow("POST", "/completions", "native_completion", "the same", NATIVE),
    RouteRow("POST", "/infill", "infill", "code between a prefix and a suffix", NATIVE),
    RouteRow("POST", "/tokenize", "tokenize", "the tokens of a text", NATIVE),
    RouteRow("POST", "/detokenize", "detokenize", "the text of tokens", NATIVE),
    RouteRow("POST", "/apply-template", "apply_template", "the prompt that a conversation becomes", NATIVE),
    RouteRow("POST", "/embedding", "native_embedding", "vectors of texts, in llama-server's form", NATIVE),
    RouteRow("POST", "/embeddings", "native_embedding", "the same", NATIVE),
    RouteRow("GET", "/props", "props", "what a model is and how it is served", NATIVE),
    RouteRow("POST", "/props", "props", "changes properties; there is none yet that can be changed", NATIVE),
    RouteRow("GET", "/slots", "slots", "the slots of a model", NATIVE),
    RouteRow("POST", "/slots/{id_slot}", "slot", "saves, restores or erases what lies in a slot", NATIVE),
    RouteRow("GET", "/lora-adapters", "adapters", "the LoRA adapters of a model", NATIVE),
    RouteRow("POST", "/lora-adapters", "adapters", "the scales that they have for everybody; for admins", NATIVE),
    RouteRow("GET", "/models", "native_models", "the same, one entry for a model and its aliases", NATIVE),
    RouteRow("POST", "/models/load", "load_model", "has a model's workers started; for admins", NATIVE),
    RouteRow("POST", "/models/unload", "unload_model", "has them drained and stopped; for admins", NATIVE),
    RouteRow("POST", "/v1/load_lora_adapter", "load_adapter", "loads an adapter on all workers; for admins"),
    RouteRow("POST", "/v1/unload_lora_adapter", "unload_adapter", "takes it away; for admins"),
    RouteRow("GET", "/admin/explain", "explain", "how a call of a model would be placed now; for admins"),
    RouteRow("POST", "/admin/explain", "explain", "the same for a chat request, which is not sent; for admins"),
    RouteRow("GET", "/v1/health", "health", "as `GET /health`; no key needed", NATIVE),
    RouteRow("GET", "/health", "health", "the process is up; no key needed"),
    RouteRow("GET", "/healthz", "health", "the same, where probes may look for it; no key needed"),
    RouteRow("GET", "/version", "version", "which Paddock this is; no key needed"),
    RouteRow("GET", "/ready", "ready", "calls would be answered; no key needed"),
    RouteRow("POST", DRAIN_PATH, "drain", "has nobody new sent here and waits; for admins, and for `paddock drain`"),
    RouteRow("GET", "/metrics", "metrics", "Prometheus text; no key needed", NATIVE),
    RouteRow(
        "GET",
        "/metrics/targets",
        "targets",
        "the workers, as Prometheus' `http_sd_configs` reads it; no key needed",
        NATIVE,
    ),
)

PATHS = frozenset(row.path for row in ROUTES)
LISTED = ", ".join(f"{row.method} {row.path.replace(':path', '')}" for row in ROUTES)
"""The routes as the answer to an unknown path lists them: anybody may ask for such a path, again and again."""


class Routes:
    """Hands a request to the app of its route: Starlette tries one pattern after the other, 123 in the worst case, so
    paths without parameters are looked up first.

    A bare router hands on `send` as it is; a whole Starlette application would add its wrappers to every token's cost.
    """

    def __init__(self, apps: Mapping[str, ASGIApp]) -> None:
        """`apps` by the rows' names, as objects: Starlette takes functions for request handlers."""
        self._by_pattern = _router(apps, ROUTES)
        self._with_names = _router(apps, [row for row in ROUTES if "{" in row.path])
        self._by_path: dict[tuple[str, str], ASGIApp] = {
            (row.method, row.path): _Shaped(apps[row.name], row.path, row.shape)
            for row in ROUTES
            if row.method != METHOD and "{" not in row.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # A path that is not declared as it stands has names in it, or no route.
            others = self._by_pattern if scope["path"] in PATHS else self._with_names
            await self._by_path.get((scope["method"], scope["path"]), others)(scope, receive, send)
        else:
            await self._by_pattern(scope, receive, send)


def _router(apps: Mapping[str, ASGIApp], rows: Sequence[RouteRow]) -> Router:
    by_path: dict[str, list[RouteRow]] = defaultdict(list)
    for row in rows:
        if row.method != METHOD:
            by_path[row.path].append(row)
    routes: list[BaseRoute] = []
    for path, there in by_path.items():
        routes += [Route(path, _Shaped(apps[row.name], row.path, row.shape), methods=[row.method]) for row in there]
        allowed = ", ".join(row.method for row in there)
        routes.append(Route(path, _Shaped(_WrongMethod(allowed), path, there[0].shape)))
    for row in rows:
        if row.method == METHOD:
            routes.append(WebSocketRoute(row.path, _Shaped(apps[row.name], row.path, row.shape)))
    return Router(routes=routes, redirect_slashes=False, default=_unknown)


class _Shaped:
    """Sets the error shape of the route for whatever fails inside, and notes the route's path."""

    def __init__(self, inside: ASGIApp, path: str, shape: ErrorShape) -> None:
        self._inside = inside
        self._path = path.replace(":path", "")
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SHAPE], scope[ROUTE] = self._shape, self._path
        await self._inside(scope, receive, send)


class _WrongMethod:
    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(
            f"{scope['method']} {_shown(scope['path'])} does not exist. Use {self._allowed}.", allow=self._allowed
        )


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    near = f"/v1{scope['path']}"
    hint = f" Did you mean {_shown(near)}?" if near in PATHS else ""
    raise NotFound(f"There is no route {scope['method']} {_shown(scope['path'])}.{hint} Routes: {LISTED}.")


def _shown(path: str) -> str:
    return path if len(path) <= 120 else path[:117] + "..."
