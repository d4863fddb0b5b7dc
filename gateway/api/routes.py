"""Declares every route of the gateway once, with who may call it.

`GET /v1/models` answers in the caller's dialect: OpenAI's and Anthropic's APIs have the same path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.control import ADMIN, KEY, OPEN, Access, AccessControl
from gateway.api.anthropic.error_shape import ANTHROPIC
from gateway.api.dialect import ROUTE, SHAPE, ErrorShape, Handler
from gateway.api.http.diagnostics import request_log_of
from gateway.api.http.sockets import METHOD
from gateway.api.native.error_shape import NATIVE
from gateway.api.openai.writing import COMPLETIONS, OPENAI, RESPONSES, TRANSCRIPTIONS
from gateway.call import Principal
from gateway.errors import MethodNotAllowed, NotFound
from workers.protocol.control import DRAIN_PATH

SIGN_ON = "/auth/"
"""Beginning of the paths by which people sign in and out."""
VERSION_HEADER = b"anthropic-version"
"""The header that every request of Anthropic's API has."""


def shape_of_models(scope: Scope) -> ErrorShape:
    return ANTHROPIC if any(name == VERSION_HEADER for name, _ in scope["headers"]) else OPENAI


async def answer_models(
    openai: Handler, anthropic: Handler, principal: Principal, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer with the list of models or with one model, in the dialect that `shape_of_models` found."""
    await (anthropic if scope[SHAPE] is ANTHROPIC else openai)(principal, scope, receive, send)


class RouteRow(NamedTuple):
    method: str
    path: str
    access: Access
    """The key that a caller needs. An OPEN or ADMIN route can demand a token of its own (`RouteToken`)."""
    name: str
    """Name of the route's handler; several routes can have the same."""
    about: str
    shape: ErrorShape = OPENAI
    """The form of the route's errors."""
    shape_of: Callable[[Scope], ErrorShape] | None = None
    """Returns the form of a request's errors on a path that two APIs share; None: the form is always `shape`."""
    aliases: tuple[str, ...] = ()
    """Further paths of the same route: `ROUTES` has a row for each."""
    alias_of: str = ""
    """The path whose alias this row is; empty: it is none."""

    @property
    def is_for_admins(self) -> bool:
        """Whether the route is answered on the port for admins only, if there is one. A drain has a token of its own,
        and signing in is for everybody."""
        if self.path == DRAIN_PATH or self.path.startswith(SIGN_ON):
            return False
        return self.access is ADMIN or self.name == "accounts"

    @property
    def shown_path(self) -> str:
        """The path as docs and metrics show it, without Starlette's `:path`."""
        return self.path.replace(":path", "")

    def rows(self) -> Iterator[RouteRow]:
        """Yield this row, and one for each of its aliases, which differ from it by their path alone."""
        yield self
        for alias in self.aliases:
            yield self._replace(path=alias, about=f"the same as `{self.shown_path}`", aliases=(), alias_of=self.path)


DECLARED = (
    RouteRow(
        "POST",
        "/v1/chat/completions",
        KEY,
        "chat",
        "an answer to a conversation, streamed or whole",
        aliases=("/chat/completions",),
    ),
    RouteRow(
        "POST",
        "/v1/chat/completions/input_tokens",
        KEY,
        "chat_input_tokens",
        "how many tokens it would have",
        aliases=("/chat/completions/input_tokens",),
    ),
    RouteRow(
        "POST",
        "/v1/completions",
        KEY,
        "completion",
        "prompts that are continued, streamed or whole",
        COMPLETIONS,
    ),
    RouteRow("POST", "/v1/embeddings", KEY, "embeddings", "vectors of texts, pictures and sounds"),
    RouteRow(
        "POST",
        "/v1/rerank",
        KEY,
        "rerank",
        "documents by how well they fit a query",
        aliases=("/v1/reranking", "/rerank", "/reranking"),
    ),
    *(
        RouteRow(method, f"/v1{path}", KEY, name, about, shape, aliases=(path,))
        for method, path, name, about, shape in (
            ("POST", "/responses", "responses", "an answer in typed items, also in the background", RESPONSES),
            (METHOD, "/responses", "responses_socket", "the same over a WebSocket", RESPONSES),
            ("POST", "/responses/input_tokens", "input_tokens", "how many tokens it would have", RESPONSES),
            ("POST", "/responses/compact", "compact", "not served; says what to do instead", OPENAI),
            ("GET", "/responses/{response_id}", "response", "a stored response, or the events of one", OPENAI),
            ("DELETE", "/responses/{response_id}", "delete_response", "forgets it", OPENAI),
            ("POST", "/responses/{response_id}/cancel", "cancel_response", "ends one in the background", OPENAI),
            ("GET", "/responses/{response_id}/input_items", "response_input", "what it was asked", OPENAI),
        )
    ),
    RouteRow("POST", "/v1/conversations", KEY, "conversations", "not served; says what to do instead"),
    RouteRow("POST", "/v1/moderations", KEY, "moderations", "not served; says what to do instead"),
    RouteRow(
        "POST",
        "/v1/audio/transcriptions",
        KEY,
        "transcriptions",
        "what is said in a sound, streamed or whole",
        TRANSCRIPTIONS,
        aliases=("/audio/transcriptions",),
    ),
    RouteRow(
        "POST",
        "/v1/audio/translations",
        KEY,
        "translations",
        "the same in English",
        TRANSCRIPTIONS,
        aliases=("/audio/translations",),
    ),
    RouteRow("POST", "/v1/chat/completions/control", KEY, "control", "not served; says what to do instead", NATIVE),
    RouteRow("GET", "/v1/stream", KEY, "streams", "not served; says what to do instead", NATIVE),
    RouteRow("DELETE", "/v1/stream", KEY, "streams", "the same", NATIVE),
    RouteRow("POST", "/v1/streams/lookup", KEY, "streams", "the same", NATIVE),
    RouteRow("GET", "/tools", KEY, "agent_tools", "not served; says what to do instead", NATIVE),
    RouteRow("POST", "/tools", KEY, "agent_tools", "the same", NATIVE),
    RouteRow("GET", "/models/sse", KEY, "model_news", "events about models that are loaded or unloaded", NATIVE),
    RouteRow("POST", "/v1/messages", KEY, "messages", "an answer in Anthropic's form, streamed or whole", ANTHROPIC),
    RouteRow("POST", "/v1/messages/count_tokens", KEY, "count_tokens", "how many tokens a conversation has", ANTHROPIC),
    RouteRow("GET", "/v1/models", KEY, "models", "the models that the key may use", shape_of=shape_of_models),
    RouteRow("GET", "/v1/models/{model:path}", KEY, "model", "one of them", shape_of=shape_of_models),
    RouteRow(
        "POST",
        "/completion",
        KEY,
        "native_completion",
        "prompts that are continued, in llama-server's form",
        NATIVE,
        aliases=("/completions",),
    ),
    RouteRow("POST", "/infill", KEY, "infill", "code between a prefix and a suffix", NATIVE),
    RouteRow("POST", "/tokenize", KEY, "tokenize", "the tokens of a text", NATIVE),
    RouteRow("POST", "/detokenize", KEY, "detokenize", "the text of tokens", NATIVE),
    RouteRow("POST", "/apply-template", KEY, "apply_template", "the prompt that a conversation becomes", NATIVE),
    RouteRow(
        "POST",
        "/embedding",
        KEY,
        "native_embedding",
        "the same, in llama-server's form",
        NATIVE,
        aliases=("/embeddings",),
    ),
    RouteRow("GET", "/props", KEY, "props", "what a model is and how it is served", NATIVE),
    RouteRow("POST", "/props", ADMIN, "change_props", "changes properties; none can be changed yet", NATIVE),
    RouteRow("GET", "/slots", KEY, "slots", "the slots of a model", NATIVE),
    RouteRow("POST", "/slots/{id_slot}", KEY, "slot", "saves, restores or erases what lies in a slot", NATIVE),
    RouteRow("GET", "/lora-adapters", KEY, "adapters", "the LoRA adapters of a model", NATIVE),
    RouteRow("POST", "/lora-adapters", ADMIN, "set_scales", "the scales that they have for everybody", NATIVE),
    RouteRow("GET", "/models", KEY, "native_models", "the same, one entry for a model and its aliases", NATIVE),
    RouteRow("POST", "/models", ADMIN, "download_model", "has a model of the hub downloaded", NATIVE),
    RouteRow("DELETE", "/models", ADMIN, "remove_model", "stops a download, or removes a model's files", NATIVE),
    RouteRow("DELETE", "/models/{model:path}", ADMIN, "remove_model", "the same", NATIVE),
    RouteRow("POST", "/models/load", ADMIN, "load_model", "has a model's workers started", NATIVE),
    RouteRow("POST", "/models/unload", ADMIN, "unload_model", "has them drained and stopped", NATIVE),
    RouteRow("POST", "/v1/load_lora_adapter", ADMIN, "load_adapter", "loads an adapter on all workers"),
    RouteRow("POST", "/v1/unload_lora_adapter", ADMIN, "unload_adapter", "takes it away"),
    RouteRow("GET", "/admin/explain", ADMIN, "explain", "how a call of a model would be placed now"),
    RouteRow("POST", "/admin/explain", ADMIN, "explain", "the same for a chat request, which is not sent"),
    RouteRow("GET", "/admin/fleet", ADMIN, "overview", "gateways, models, workers and, if asked for, slots"),
    RouteRow("GET", "/admin/events", ADMIN, "overview_events", "the same as a stream of what changes"),
    RouteRow("GET", "/admin/plan", ADMIN, "plan", "what a load, an unload or a drain would do now"),
    RouteRow(
        "POST",
        "/admin/workers/{worker:path}/drain",
        ADMIN,
        "drain_worker",
        "has a worker finish its calls, and start anew",
    ),
    RouteRow("GET", "/admin/calls", ADMIN, "calls", "the calls that wait or run, of all gateways"),
    RouteRow("DELETE", "/admin/calls/{request_id:path}", ADMIN, "cancel_call", "cancels a call at whichever gateway"),
    RouteRow("GET", "/admin/catalog", ADMIN, "catalog", "the catalog in use, and what is wrong with its file"),
    RouteRow("PUT", "/admin/catalog", ADMIN, "write_catalog", "writes the catalog's file anew and uses it"),
    RouteRow(
        "POST", "/admin/catalog/check", ADMIN, "check_catalog", "what is wrong with a text, and what it would change"
    ),
    RouteRow("POST", "/admin/catalog/reload", ADMIN, "reload_catalog", "has this gateway read its catalog's file now"),
    RouteRow("GET", "/admin/docs", OPEN, "accounts", "a page that describes `/admin/...`"),
    RouteRow("GET", "/admin/openapi.json", OPEN, "accounts", "the same as an OpenAPI document"),
    *(
        RouteRow(method, "/admin/{path:path}", KEY, "accounts", "teams, keys, limits, budgets, usage, audit")
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
    ),
    *(
        RouteRow(
            method, f"/{kind}/{{path:path}}", KEY, "accounts", "the same for scripts that were written for LiteLLM"
        )
        for kind in ("key", "team", "user")
        for method in ("GET", "POST")
    ),
    RouteRow("GET", "/spend/{path:path}", KEY, "accounts", "the same"),
    RouteRow("POST", "/auth/logout", KEY, "accounts", "ends the session of a person who signed in"),
    *(
        RouteRow(method, "/auth/{path:path}", OPEN, "accounts", "single sign-on of people")
        for method in ("GET", "POST")
    ),
    RouteRow("GET", "/openapi.json", OPEN, "document", "all routes and their bodies, as an OpenAPI document"),
    RouteRow("GET", "/docs", OPEN, "document_page", "the same as a page"),
    RouteRow("GET", "/", OPEN, "front", "leads to the console"),
    RouteRow("GET", "/ui", OPEN, "console", "the console, a page for browsers", aliases=("/ui/",)),
    RouteRow("GET", "/ui/session", OPEN, "console_session", "who is signed in to it"),
    RouteRow("POST", "/ui/session", OPEN, "sign_in", "signs in by an API key, which is kept in a cookie"),
    RouteRow("DELETE", "/ui/session", OPEN, "sign_out", "has the browser forget it"),
    RouteRow("GET", "/ui/{file}", OPEN, "console", "the console's files"),
    RouteRow("GET", "/health", OPEN, "health", "the process is up", aliases=("/v1/health", "/healthz")),
    RouteRow("GET", "/version", OPEN, "version", "which Paddock this is"),
    RouteRow("GET", "/ready", OPEN, "ready", "calls would be answered"),
    RouteRow("POST", DRAIN_PATH, ADMIN, "drain", "has nobody new sent here and waits; also for `paddock drain`"),
    RouteRow("GET", "/metrics", OPEN, "metrics", "Prometheus text", NATIVE),
    RouteRow("GET", "/metrics/targets", OPEN, "targets", "the workers, for Prometheus' `http_sd_configs`", NATIVE),
)

ROUTES = tuple(row for declared in DECLARED for row in declared.rows())
PATHS = frozenset(row.path for row in ROUTES)
MAX_LIKE_CHARS, LIKENESS = 64, 0.75
"""Maximum length of an unknown path that is compared with those of the routes (0.3 ms), and how alike they must be, 1
being the same."""
"""All routes, for the error about an unknown path. Made once, as anybody can request such paths over and over."""


class Routes:
    """Passes a request and its caller to the handler of its route. Starlette's router tries one pattern after another,
    up to 123, so paths without parameters are looked up in a dict first.

    The router is not part of a Starlette application, whose wrappers around `send` would run for every token."""

    def __init__(self, handlers: Mapping[str, Handler], access: AccessControl, admin_port: int = 0) -> None:
        """`handlers`: `RouteRow.name` -> handler. `admin_port`: the port for admins; 0: there is none."""
        served = [(row, _Endpoint(row, handlers[row.name], access, admin_port)) for row in ROUTES]
        self._by_pattern = _router(served)
        self._with_names = _router([(row, app) for row, app in served if "{" in row.path])
        self._by_path: dict[tuple[str, str], ASGIApp] = {
            (row.method, row.path): app for row, app in served if row.method != METHOD and "{" not in row.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # A path that is not in PATHS matches a pattern with names in it, or none.
            others = self._by_pattern if scope["path"] in PATHS else self._with_names
            await self._by_path.get((scope["method"], scope["path"]), others)(scope, receive, send)
        else:
            await self._by_pattern(scope, receive, send)


class _Endpoint:
    """The ASGI app of one route: puts path and error form into the scope, identifies the caller, calls the handler."""

    def __init__(self, row: RouteRow, handler: Handler, access: AccessControl, admin_port: int) -> None:
        self._path = row.shown_path
        self._shape, self._shape_of = row.shape, row.shape_of
        self._needs = row.access
        self._access = access
        self._handler = handler
        self._only_port = admin_port if row.is_for_admins else 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SHAPE] = self._shape if self._shape_of is None else self._shape_of(scope)
        scope[ROUTE] = self._path
        if self._only_port and scope["server"][1] != self._only_port:
            raise NotFound(
                f"{scope['method']} {_shorten(scope['path'])} is answered on this gateway's port {self._only_port} "
                "only (PADDOCK_ADMIN_PORT). Call it there."
            )
        principal = await self._access.identify(scope, request_log_of(scope), self._needs)
        await self._handler(principal, scope, receive, send)


def spellings(method: str, path: str) -> tuple[str, ...]:
    """Return `POST /v1/...` of a declared route and of each of its aliases. Raises ValueError if there is none."""
    found = tuple(f"{method} {row.path}" for row in ROUTES if row.method == method and path in (row.path, row.alias_of))
    if not found:
        raise ValueError(f"there is no route {method} {path}")
    return found


def _router(served: Sequence[tuple[RouteRow, _Endpoint]]) -> Router:
    by_path: dict[str, list[tuple[RouteRow, _Endpoint]]] = defaultdict(list)
    for row, app in served:
        if row.method != METHOD:
            by_path[row.path].append((row, app))
    routes: list[BaseRoute] = []
    for path, there in by_path.items():
        routes += [Route(path, app, methods=[row.method]) for row, app in there]
        routes.append(Route(path, _WrongMethod([row for row, _ in there])))
    routes += [WebSocketRoute(row.path, app) for row, app in served if row.method == METHOD]
    return Router(routes=routes, redirect_slashes=False, default=_unknown)


class _WrongMethod:
    """The ASGI app for all other methods of a path: refuses them with a 405, without asking for a key."""

    def __init__(self, rows: Sequence[RouteRow]) -> None:
        self._path = rows[0].shown_path
        self._shape = rows[0].shape
        self._allowed = ", ".join(row.method for row in rows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SHAPE], scope[ROUTE] = self._shape, self._path
        message = f"{scope['method']} {_shorten(scope['path'])} does not exist. Use {self._allowed}."
        raise MethodNotAllowed(message, allow=self._allowed)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    hint = f" Did you mean {near}?" if (near := _nearest(scope["path"])) else ""
    raise NotFound(
        f"There is no route {scope['method']} {_shorten(scope['path'])}.{hint} `GET /docs` lists them for people, `GET "
        "/openapi.json` for programs."
    )


def _nearest(path: str) -> str:
    """Return the path of a route that may have been meant; empty: there is none, or looking for it takes long."""
    if f"/v1{path}" in PATHS:
        return f"/v1{path}"
    found = get_close_matches(path, PATHS, n=1, cutoff=LIKENESS) if len(path) <= MAX_LIKE_CHARS else []
    return found[0] if found else ""


def _shorten(path: str) -> str:
    return path if len(path) <= 120 else path[:117] + "..."
