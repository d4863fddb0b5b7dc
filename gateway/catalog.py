"""Resolves the names that callers use to models, from the catalog and from what the fleet serves. Pure.

A call that names none gets the catalog's default for its job, else the only model that can do it. Of several models
behind one name, a conversation has the same one in every turn (`_draw`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from gateway.call import Principal
from gateway.errors import InvalidRequest, ModelNotFound, NotSupported, PermissionDenied, Unavailable
from workers.models.catalog import AliasChain, Catalog, Defaults, Job, Target
from workers.protocol.heartbeat import Heartbeat, WorkerKind
from workers.protocol.requests import GenerateRequest, Infill, Prompt

KIND_OF: dict[Job, WorkerKind] = {"chat": "generate", "embed": "embed", "rerank": "rank", "infill": "generate"}
JOB_OF: dict[WorkerKind, Job] = {"generate": "chat", "embed": "embed", "rank": "rerank"}

DOES: dict[WorkerKind, str] = {"generate": "generates text", "embed": "makes embeddings", "rank": "ranks documents"}
CANNOT: dict[WorkerKind, str] = {"generate": "generate text", "embed": "make embeddings", "rank": "rank documents"}
WHERE: dict[WorkerKind, str] = {
    "generate": "POST /v1/chat/completions",
    "embed": "POST /v1/embeddings",
    "rank": "POST /v1/rerank",
}
REMEDY: dict[WorkerKind, str] = {
    "generate": "",
    "embed": " An operator can serve it for that beside, with `embeddings: true` in its `llama` settings.",
    "rank": "",
}


def check_kind(alias: str, wanted: WorkerKind, beats: Iterable[Heartbeat]) -> None:
    """Raise NotSupported where a model's workers are all of another kind. A model without any may be of any kind."""
    kinds = {beat.kind for beat in beats}
    if _is_kind(wanted, kinds):
        return
    kind = min(kinds)
    # A ranking model makes scores only; whatever generates text can make vectors as well.
    remedy = REMEDY[wanted] if kind == "generate" else ""
    raise NotSupported(
        f"The model `{alias}` {DOES[kind]} and can't {CANNOT[wanted]}. Ask it through {WHERE[kind]}, "
        f"or name a model that does (see GET /v1/models).{remedy}",
        param="model",
    )


def models_of_kind(
    alias: str, wanted: WorkerKind, models: Sequence[str], workers: Mapping[str, Iterable[Heartbeat]]
) -> tuple[str, ...]:
    """Return those of an alias's models that may be of the kind. Raises NotSupported where none is."""
    found = tuple(model for model in models if _is_kind(wanted, {beat.kind for beat in workers.get(model, ())}))
    if not found:
        check_kind(alias, wanted, workers[models[0]])
    return found


def _is_kind(wanted: WorkerKind, kinds: Set[WorkerKind]) -> bool:
    return not kinds or wanted in kinds


Workers = Mapping[str, Iterable[Heartbeat]]
"""Model -> its workers; models without any may be left out."""


def default_name(defaults: Defaults, job: Job) -> str:
    """Return the catalog's default name for a job; empty: it has none."""
    return {
        "chat": defaults.chat,
        "embed": defaults.embed,
        "rerank": defaults.rerank,
        "infill": defaults.infill,
    }[job] or ""


def capable_models(job: Job, models: Iterable[str], workers: Workers) -> frozenset[str]:
    """Return the models that may do a job. One without workers counts: what it does is not known."""
    return frozenset(model for model in models if _can_do(job, tuple(workers.get(model, ()))))


def only_model(models: Set[str], workers: Workers) -> str:
    """Return the only one of these models, or of several the only one that has workers; empty: there is none."""
    served = models if len(models) == 1 else {model for model in models if any(True for _ in workers.get(model, ()))}
    return next(iter(served)) if len(served) == 1 else ""


def _can_do(job: Job, beats: tuple[Heartbeat, ...]) -> bool:
    kind = KIND_OF[job]
    return not beats or any(beat.kind == kind and (job != "infill" or beat.infill) for beat in beats)


OPENING_CHARS = 1024
"""Characters of an infill prefix that are hashed: a text that is being edited keeps its beginning."""

WHOLE_CHARS, END_CHARS = 64 << 10, 128
"""The first WHOLE_CHARS of an opening are hashed whole; of longer texts behind them both ends of END_CHARS and the
length. Hashing 8 MiB, or as many tokens, would hold the event loop for tens of milliseconds.
"""
WHOLE_ITEMS, END_ITEMS = 4096, 256
"""The same bounds for the number of messages, and of a prompt's tokens and texts."""

_END = b"\x00"


def rank_targets(targets: Sequence[Target], conversation: str) -> tuple[str, ...]:
    """Return the names of the models, first the one for the conversation; those without weight are left out.

    Without a conversation (empty) the model of most weight comes first.
    """
    if conversation:
        ranked = sorted(targets, key=lambda target: -_draw(target, conversation))
    else:
        ranked = sorted(targets, key=lambda target: -target.weight)
    return tuple(target.model for target in ranked if target.weight)


def conversation_of(request: GenerateRequest, team: str, session: str) -> str:
    """Return a hash that is the same in all turns of a conversation; those of two users hardly share one.

    `session` is the caller's own name for the conversation; empty: the hash is of how it begins.
    """
    named = blake2b(team.encode() + _END, digest_size=16)
    left = WHOLE_CHARS
    for text in ("session", session) if session else _opening_texts(request):
        left -= len(text)
        named.update((text if left >= 0 else _ends_of(text)).encode() + _END)
    return named.hexdigest()


def _opening_texts(request: GenerateRequest) -> Iterator[str]:
    """Yield a chat's texts up to its first user message (those before are often everybody's), or the whole prompt."""
    if request.prompt is not None:
        yield from map(str, _parts(request.prompt))
    elif request.infill is not None:
        yield from _infill_texts(request.infill)
    else:
        for message in request.messages[:WHOLE_ITEMS]:
            yield message.content or ""
            if message.role == "user":
                return


def _parts(prompt: Prompt) -> Sequence[int | str]:
    """Return the parts that identify a prompt: all of them, or those at both ends and their number."""
    if isinstance(prompt, str):
        return (prompt,)
    if len(prompt) <= WHOLE_ITEMS:
        return prompt
    return (*prompt[:END_ITEMS], len(prompt), *prompt[-END_ITEMS:])


def _ends_of(text: str) -> str:
    """Return the whole text if it is short, else both ends and the length, which nearly always identify it."""
    return text if len(text) <= 2 * END_CHARS else f"{text[:END_CHARS]}\0{len(text)}\0{text[-END_CHARS:]}"


def _infill_texts(infill: Infill) -> Iterator[str]:
    yield infill.prefix[:OPENING_CHARS]
    yield from (file.name for file in infill.files)


def _draw(target: Target, conversation: str) -> float:
    """Return a model's number for a conversation: how often it is the highest is the model's share of the weights.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005). When a weight
    changes, only the conversations move that have to.
    """
    digest = blake2b(target.model.encode() + _END + conversation.encode(), digest_size=8).digest()
    between_0_and_1 = ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)
    return -target.weight / math.log(between_0_and_1)


MAX_NAMES_TOLD = 20

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class ResolvedName(NamedTuple):
    """The name that a call goes by, and the model behind it."""

    name: str
    model: str
    stands_in: bool = False
    """Whether the call's own name is not known, and the catalog lets such calls fall back."""


class ModelNames:
    """Maps every name to its model. A model's own name is an alias of itself.

    Models that workers serve without being in the catalog count as well, so that a worker started alone is reachable.
    So do LoRA adapters (name -> model) whose names nothing else has. A key that is limited to some names needs the
    adapter's own name among them: the base model's name does not give access to its adapters.
    A name of several models leads to the target of most weight, and to the others as `chain` says.
    """

    def __init__(self, catalog: Catalog | None) -> None:
        self.models = frozenset(model.name for model in catalog.models) if catalog is not None else frozenset()
        """Models of the catalog."""
        self.tags = {model.name: model.tags for model in catalog.models} if catalog is not None else {}
        """Model -> its tags in the catalog."""
        self.meant = frozenset(model.name for model in catalog.models if model.workers) if catalog else frozenset()
        """Models of the catalog that are meant to have a worker."""
        self._defaults = Defaults() if catalog is None else catalog.default
        self._takes_unknown = catalog is not None and catalog.unknown_model == "default"
        self.scales: dict[str, dict[str, float]] = {}
        """Model -> its default adapters and their scales, for calls that name none."""
        for spec in catalog.models if catalog is not None else ():
            self.scales[spec.name] = {adapter.name: adapter.scale for adapter in spec.adapters if adapter.scale}
        self._fixed: dict[str, str] = {}
        self._chains: dict[str, AliasChain] = {}
        if catalog is not None:
            self._chains = {name: entry for name, entry in catalog.aliases.items() if isinstance(entry, AliasChain)}
            for name, entry in catalog.aliases.items():
                self._fixed[name] = entry if isinstance(entry, str) else rank_targets(entry.shares(), "")[0]
            self._fixed.update({model.name: model.name for model in catalog.models})

    def all(self, fleet_models: Iterable[str], adapters: Mapping[str, str] = NO_ADAPTERS) -> dict[str, str]:
        """Return name -> model, sorted. The catalog goes before the fleet, a model's name before an adapter's."""
        names = {**adapters, **{model: model for model in fleet_models}, **self._fixed}
        return dict(sorted(names.items()))

    def permitted(
        self, principal: Principal, fleet_models: Iterable[str], adapters: Mapping[str, str] = NO_ADAPTERS
    ) -> dict[str, str]:
        names = self.all(fleet_models, adapters)
        return {name: model for name, model in names.items() if principal.may_use(name)}

    def resolve(
        self,
        name: str,
        principal: Principal,
        fleet_models: Iterable[str],
        adapters: Mapping[str, str] = NO_ADAPTERS,
        *,
        complete: bool = True,
    ) -> str:
        """Return the model behind a name. `complete`: whether all that the fleet serves is known.

        Raises Unavailable for an unknown name while that is not so; ModelNotFound and PermissionDenied, which list
        the names that would do.
        """
        names = self.all(fleet_models, adapters)
        _check_known(name, names, complete=complete)
        model = names.get(name)
        if model is not None and principal.may_use(name):
            return model
        usable = [other for other in names if principal.may_use(other)]
        if model is None:
            raise ModelNotFound(f"The model {_quote(name)} does not exist. {_list_usable(usable)}", param="model")
        raise PermissionDenied(
            f"This API key may not use the model {_quote(name)}. {_list_usable(usable)}", param="model"
        )

    def resolve_call(
        self,
        name: str,
        principal: Principal,
        fleet_models: Iterable[str],
        adapters: Mapping[str, str] = NO_ADAPTERS,
        workers: Workers = MappingProxyType({}),
        *,
        job: Job | None = None,
        strict: bool = False,
        complete: bool = True,
    ) -> ResolvedName:
        """Return the name and model for a call that names `name`; empty: it names none.

        `job`: what the call wants done; None: it asks about a model. `strict`: only a known name will do, or the only
        model of all where the call names none. Raises as `resolve`; without a name InvalidRequest and NotSupported.
        """
        names = self.all(fleet_models, adapters)
        is_unknown = bool(name) and name not in names
        if name and not (is_unknown and complete and self._takes_unknown and not strict):
            return ResolvedName(name, self.resolve(name, principal, fleet_models, adapters, complete=complete))
        usable = {
            other: model
            for other, model in names.items()
            if principal.may_use(other) and not self.is_adapter(other, fleet_models, adapters)
        }
        own = "" if strict else default_name(self._defaults, job or "chat")
        if own not in usable:
            _check_known(name, names, complete=complete)
            own = _only(usable, workers, job, strict=strict)
        if own:
            return ResolvedName(own, names[own], stands_in=is_unknown)
        if is_unknown:
            return ResolvedName(name, self.resolve(name, principal, fleet_models, adapters))
        raise _missing_model_error(usable, workers, job)

    def is_chain(self, name: str) -> bool:
        return name in self._chains

    def chain(self, name: str, conversation: str) -> tuple[str, ...]:
        """Return the models behind a name of the catalog: the one for this conversation, then its fallbacks."""
        entry = self._chains.get(name)
        if entry is None:
            return (self._fixed[name],)
        found = list(rank_targets(entry.shares(), conversation))
        for fallback in entry.fallbacks:
            found += (model for model in self.chain(fallback, conversation) if model not in found)
        return tuple(found)

    def is_adapter(self, name: str, fleet_models: Iterable[str], adapters: Mapping[str, str]) -> bool:
        """Return whether a name that resolves is an adapter's."""
        return name in adapters and name not in self._fixed and name not in fleet_models


def _check_known(name: str, names: Mapping[str, str], *, complete: bool) -> None:
    """Raise Unavailable where a name is not known that may be known soon."""
    if not complete and name not in names:
        message = "This gateway has not read yet which models there are. Send the request again."
        raise Unavailable(message)


def _only(usable: Mapping[str, str], workers: Workers, job: Job | None, *, strict: bool) -> str:
    """Return the name of the only model that can do the job, or of the only model at all; empty: there is none.

    The only model at all gets errors that name what it can't do. A question about a model goes to one that chats.
    """
    models = frozenset(usable.values())
    found = "" if strict else only_model(capable_models(job or "chat", models, workers), workers)
    if not found and (strict or job is None or len(models) == 1):
        found = only_model(models, workers)
    return found if found in usable else next((name for name, model in usable.items() if model == found), "")


def _missing_model_error(
    usable: Mapping[str, str], workers: Workers, job: Job | None
) -> InvalidRequest | ModelNotFound | NotSupported:
    """Return the error for a caller that names no model where one has to be named."""
    if not usable:
        return ModelNotFound(f"`model` is missing. {_list_usable([])}", param="model")
    wanted = job or "chat"
    fit = capable_models(wanted, usable.values(), workers)
    if job is None:
        fit = frozenset(usable.values())
    if not fit:
        what = "fill in code" if job == "infill" else CANNOT[KIND_OF[wanted]]
        return NotSupported(
            f"`model` is missing, and no model that this key may use can {what}. {_list_usable(list(usable))}"
        )
    names = [name for name, model in usable.items() if model in fit]
    remedy = f"An operator can name one for such calls, as `default.{wanted}` in the catalog."
    return InvalidRequest(f"`model` is missing. {_list_usable(names)} {remedy}", param="model")


def _quote(name: str) -> str:
    return f"`{name[:128]}`" + ("..." if len(name) > 128 else "")


def _list_usable(usable: list[str]) -> str:
    if not usable:
        return "There is no model that this key may use; ask the operator to start a worker or to widen the key."
    more = len(usable) - MAX_NAMES_TOLD
    rest = f" and {more} more (see GET /v1/models)" if more > 0 else ""
    return "Use one of: " + ", ".join(usable[:MAX_NAMES_TOLD]) + rest + "."
