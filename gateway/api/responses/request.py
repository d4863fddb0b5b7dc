"""Reads a Responses request into the canonical request: first what was sent (`Draft`), then with stored responses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.api.intake.body import read_object
from gateway.api.intake.decoding import let_loop_run
from gateway.api.media.attachments import Attachments
from gateway.api.parameters.base import quote
from gateway.api.parameters.options import add_hints, read_lora, read_progress_notices, read_stop
from gateway.api.parameters.response_format import ANY_OBJECT, drop_beside_tools, one_constraint, schema_constraint
from gateway.api.parameters.sampling import read_sampling
from gateway.api.parameters.thinking import read_template_values, read_thinking
from gateway.api.parameters.unsupported import read_body
from gateway.api.responses.body import IGNORED, REFUSED, ResponsesBody
from gateway.api.responses.items import (
    Item,
    is_response_id,
    messages_of,
    new_response_id,
    read_input,
    reference_of,
    response_of,
)
from gateway.api.responses.records import Record
from gateway.api.responses.tools import custom_names, read_tools, tools_object
from gateway.errors import InvalidRequest, PreviousNotFound, ResponseNotFound, TakesTooMuch, UnsupportedParameter
from gateway.telemetry.request_log import Ignored
from workers.protocol.requests import Constraint, GenerateRequest, Medium, Message, Thinking

LONGEST_INPUT = 32 << 20
"""Default maximum bytes of all items of a conversation, including the stored items that the request names by id."""

_encode = msgspec.json.Encoder().encode

LONG_CHARS = 64 << 10
"""Instructions of more characters than this, and an input of more bytes than this, are encoded to JSON only once, since
they are sent or stored several times."""

MAX_REPEATED_BYTES = 1 << 20
"""Maximum bytes of the request's fields that the response repeats; more are refused (TakesTooMuch). Every event with
the whole response repeats them again."""

LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request, and how the answer is to be written and stored."""

    id: str
    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool
    store: bool
    background: bool
    created_at: int
    fit: bool
    """Whether a conversation that exceeds the context loses its oldest turns."""
    echo: dict[str, Any]
    """Fields of the request that the response repeats."""
    to_keep: tuple[Item, ...] | bytes
    """The request's own input, for its record. A long input is already encoded (bytes): 6 MiB take 6 ms, and a response
    may be stored three times."""
    chain: tuple[str, ...]
    """Ids of the earlier responses of the conversation, oldest first."""
    generates: bool = True
    """False: the prompt is computed, and no answer is generated."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the custom tools, whose input is a text and not JSON."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A request as it was sent, before items of stored responses are added to it."""

    body: ResponsesBody
    id: str
    input: tuple[Item, ...]
    request: GenerateRequest
    """The canonical request without its messages."""
    generates: bool = True
    num_bytes: int = 0
    """Bytes of the request's body."""
    is_remembered: bool = False
    """Whether the WebSocket connection remembers the response if it is not stored."""
    attachments: Attachments = field(default_factory=Attachments)
    """The files for which tokens stand in `input`, and in the stored responses that are loaded for it."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Ids of the stored responses to look up: the previous one, and those whose items the request names by id."""
        previous = self.body.previous_response_id
        referred = (response_of(reference) for item in self.input if (reference := reference_of(item)))
        return tuple(dict.fromkeys(id_ for id_ in (previous, *referred) if id_ is not None))

    def resolved(self, found: Mapping[str, Record], max_bytes: int = LONGEST_INPUT) -> Resolved:
        """Return the request with its own items and those of the conversation before it. `found`: id -> record, for the
        ids in `needs` and for the responses before the previous one. `max_bytes`: maximum bytes of all items.

        Raises InvalidRequest, PreviousNotFound, ResponseNotFound, TakesTooMuch."""
        chain = _chain(self.body.previous_response_id, found)
        before = tuple(item for id_ in chain for item in _present(found, id_, "previous_response_id").items)
        own = _replace_references(self.input, found)
        if not found:
            return Resolved(self, chain, before, own, self.num_bytes, self.num_bytes)
        num_own = _size(own, self.attachments)
        num_bytes = _size(before, self.attachments) + num_own
        if num_bytes > max_bytes:
            raise TakesTooMuch(
                f"The conversation has {num_bytes} bytes, what is referred to included; {max_bytes} may be sent on. "
                "Send less, or refer to less.",
                param="input",
            )
        return Resolved(self, chain, before, own, num_own, num_bytes)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request in which each reference to a stored item is replaced by that item."""

    draft: Draft
    chain: tuple[str, ...]
    before: tuple[Item, ...]
    own: tuple[Item, ...]
    num_own: int
    """Bytes of `own`, the request's own items. An item that is named twice by id counts twice."""
    num_bytes: int
    """Bytes of `own` and `before`."""

    def complete(self) -> ResponseRequest:
        """Return the request to compute, write and store. Raises InvalidRequest, TakesTooMuch."""
        draft, body = self.draft, self.draft.body
        messages, media = messages_of((*self.before, *self.own), draft.attachments, len(self.before))
        if not messages and (draft.generates or body.instructions is None):
            raise InvalidRequest("`input` is missing. Send a text or items.", param="input")
        if body.instructions is not None:
            messages = (Message(role="system", content=body.instructions), *messages)
        is_kept = body.store or draft.is_remembered
        is_long = self.num_own > LONG_CHARS or draft.attachments.num_bytes > 0
        return ResponseRequest(
            id=draft.id,
            model=body.model,
            requests=(_with_messages(draft, messages, media),),
            stream=body.stream,
            store=body.store,
            background=body.background,
            created_at=int(time.time()),
            fit=body.truncation == "auto",
            echo=_echo(body),
            to_keep=_encode_items(self.own, draft.attachments) if is_kept and is_long else self.own,
            chain=self.chain,
            generates=draft.generates,
            custom_tools=custom_names(body.tools),
        )


def _with_messages(draft: Draft, messages: tuple[Message, ...], media: tuple[Medium, ...]) -> GenerateRequest:
    request = replace(draft.request, messages=messages, media=media)
    return request if draft.generates else replace(request, max_tokens=0)


def read_draft(raw: bytes, ignored: Ignored | None = None, attachments: Attachments | None = None) -> Draft:
    """Parse the body of a request; `ignored` notes the parameters that have no effect. `attachments`: the files that
    were cut out of the body.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter by its path."""
    attachments = attachments or Attachments()
    num_bytes = len(raw) + attachments.num_chars
    return draft_of(read_object(raw), ignored or Ignored(), attachments, num_bytes=num_bytes)


def draft_of(
    document: dict[str, Any],
    ignored: Ignored,
    attachments: Attachments | None = None,
    *,
    generates: bool = True,
    num_bytes: int = 0,
) -> Draft:
    """Check and read the JSON object of a request. Raises what `read_draft` raises."""
    attachments = attachments or Attachments()
    body = read_body(ResponsesBody, document, (IGNORED, REFUSED), ignored)
    _check(body, ignored)
    response_id = new_response_id()
    items = read_input(body.input, response_id, attachments)
    # As pydantic models, the items take ten times their bytes, and the request may have to wait long.
    body = body.model_copy(update={"input": None})
    request = _request(body, ignored)
    return Draft(body, response_id, items, request, generates, num_bytes, attachments=attachments)


def _check(body: ResponsesBody, ignored: Ignored) -> None:
    if body.background and not body.store:
        message = "`background` needs `store: true`: its answer is fetched later. Leave `store` out."
        raise InvalidRequest(message, param="background")
    if body.stream_options is not None and not body.stream:
        message = "`stream_options` needs `stream: true`. Leave it out, or stream."
        raise InvalidRequest(message, param="stream_options")
    if body.text.verbosity not in (None, "medium"):
        ignored.note("verbosity")
        if not ignored.refuses:
            return
        message = "`text.verbosity` is not supported with this value. Say in the prompt how long the answer should be."
        raise UnsupportedParameter(message, param="text.verbosity")


def _request(body: ResponsesBody, ignored: Ignored) -> GenerateRequest:
    tools, forced = read_tools(body)
    request = GenerateRequest(
        tools=tools,
        forced_tools=forced,
        parallel_tool_calls=body.parallel_tool_calls,
        thinking=_thinking(body),
        template_values=read_template_values(body),
        constraint=drop_beside_tools(one_constraint(_format(body), body), forced, ignored),
        sampling=read_sampling(body),
        max_tokens=body.max_output_tokens,
        stop=read_stop(body.stop),
        adapters=read_lora(body),
        n_probs=_n_probs(body),
        tell=read_progress_notices(body, stream=body.stream),
    )
    return add_hints(request, body)


def _n_probs(body: ResponsesBody) -> int:
    if LOGPROBS not in (body.include or ()) and not body.top_logprobs:
        return 0
    return body.top_logprobs or -1


def _thinking(body: ResponsesBody) -> Thinking:
    effort = body.reasoning.effort
    if effort is None:
        return read_thinking(body)
    if body.reasoning_effort not in (None, effort):
        message = "`reasoning.effort` and `reasoning_effort` contradict each other. Send one of them."
        raise InvalidRequest(message, param="reasoning_effort")
    return read_thinking(body.model_copy(update={"reasoning_effort": effort}))


def _format(body: ResponsesBody) -> Constraint | None:
    form = body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return schema_constraint(ANY_OBJECT, "text.format")
    if form.type != "json_schema":
        message = f"`text.format.type` is {quote(form.type)}. Send `text`, `json_object` or `json_schema`."
        raise InvalidRequest(message, param="text.format.type")
    for name, given in (("name", form.name), ("schema", form.schema_)):
        if given is None:
            raise InvalidRequest(f"`text.format.{name}` is missing. Send it.", param=f"text.format.{name}")
    return schema_constraint(form.schema_, "text.format.schema")


def _chain(previous: str | None, found: Mapping[str, Record]) -> tuple[str, ...]:
    if previous is None:
        return ()
    return (*_present(found, previous, "previous_response_id").chain, previous)


def _replace_references(items: Iterable[Item], found: Mapping[str, Record]) -> tuple[Item, ...]:
    """Return the items, with each reference replaced by the stored item that it names. Raises ResponseNotFound.

    The items of each response are read only once, however many references name them."""
    known: dict[str, dict[str, Item]] = {}
    own: list[Item] = []
    for item in items:
        reference = reference_of(item)
        if reference is None:
            own.append(item)
            continue
        id_ = response_of(reference) or ""
        if id_ not in known:
            record = found.get(id_)
            # If several items have one id, which only callers can cause, the first counts.
            known[id_] = {one["id"]: one for one in reversed(record.items)} if record is not None else {}
        if reference not in known[id_]:
            raise ResponseNotFound(
                f"There is no item {quote(reference)}: it was never kept, or is not kept any more. Send the item "
                "itself.",
                param="input",
            )
        own.append(known[id_][reference])
    return tuple(own)


def _size(items: Iterable[Item], attachments: Attachments) -> int:
    """Return the bytes of the items as JSON, their files included; an item counts each time that it occurs."""
    sizes: dict[int, int] = {}
    num_bytes = 0
    for item in items:
        size = sizes.get(id(item))
        if size is None:
            encoded = _encode(item)
            size = sizes[id(item)] = len(encoded) + attachments.num_chars_in(encoded)
            let_loop_run()
        num_bytes += size
    return num_bytes


def _encode_items(items: Iterable[Item], attachments: Attachments) -> bytes:
    """Return items as a JSON array, with the base64 of their files. An item that occurs twice is encoded once. The
    event loop can run between items."""
    encoded: dict[int, bytes] = {}
    pieces = [b"["]
    for number, item in enumerate(items):
        if id(item) not in encoded:
            encoded[id(item)] = attachments.whole(_encode(item))
            let_loop_run()
        pieces += (b"," if number else b"", encoded[id(item)])
    return b"".join((*pieces, b"]"))


def _present(found: Mapping[str, Record], id_: str, param: str) -> Record:
    record = found.get(id_)
    if record is None:
        raise PreviousNotFound(not_found(id_).message, param=param)
    if record.response["status"] in ("queued", "in_progress"):
        message = f"Response {quote(id_)} is not complete yet. Wait for it, then go on from it."
        raise InvalidRequest(message, param=param)
    if record.is_too_long:
        message = (
            f"Response {quote(id_)} failed since its prompt was too long, and its input was not kept. Go on from the "
            "response before it, and send less."
        )
        raise InvalidRequest(message, param=param)
    return record


def not_found(id_: str) -> ResponseNotFound:
    never = "" if is_response_id(id_) else " This is no id that Paddock makes."
    return ResponseNotFound(
        f"There is no response {quote(id_)}: it was not stored, was deleted, or its time is over.{never}"
    )


def _echo(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format
    choice = body.tool_choice
    repeated = {
        "background": body.background,
        "instructions": _encoded_once(body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": _format_object(body) if form is not None else {"type": "text"}, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True),
        "tools": tools_object(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation,
        **({"user": body.user} if body.user is not None else {}),
    }
    texts = (body.instructions, body.user, body.safety_identifier, body.prompt_cache_key)
    if body.tools or form is not None or sum(map(len, filter(None, texts))) > LONG_CHARS:
        # Encoded once, and only copied for each of the events that repeat it: 1 MiB of tools takes 3 ms to encode.
        repeated |= {name: msgspec.Raw(_encode(repeated[name])) for name in ("text", "tool_choice", "tools")}
        _check_repeated(repeated)
    return repeated


def _check_repeated(repeated: Mapping[str, Any]) -> None:
    """Raise TakesTooMuch if the response would repeat too much of the request."""
    num_bytes = len(_encode(repeated))
    if num_bytes > MAX_REPEATED_BYTES:
        raise TakesTooMuch(
            f"A response repeats its instructions, tools, format and names, which have {num_bytes} bytes here; "
            f"{MAX_REPEATED_BYTES} may be. Send long instructions as a system message in `input`.",
            param="instructions" if isinstance(repeated["instructions"], msgspec.Raw) else "tools",
        )


def _encoded_once(text: str | None) -> str | msgspec.Raw | None:
    """Return the text; a long one as encoded JSON, since a stored and streamed response repeats it ten times."""
    return msgspec.Raw(_encode(text)) if text is not None and len(text) > LONG_CHARS else text


def _format_object(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    told = {"type": form.type, "name": form.name, "schema": form.schema_, "strict": bool(form.strict)}
    return told if form.description is None else {**told, "description": form.description}
