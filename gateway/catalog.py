"""Resolves the names that callers use to models, from the catalog and from what the fleet serves. Does no I/O.

A call without a model name gets the catalog's default for its job or, without a default, the only model that can do
the job. If a name has several models, all turns of a conversation go to the same one (`_draw`).
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
    """Raise NotSupported if all workers of a model are of another kind. Without workers, its kind is unknown."""
    kinds = {beat.kind for beat in beats}
    if _is_kind(wanted, kinds):
        return
    kind = min(kinds)
    # A ranking model makes scores only; a model that generates text can make vectors as well.
    remedy = REMEDY[wanted] if kind == "generate" else ""
    raise NotSupported(
        f"The model `{alias}` {DOES[kind]} and can't {CANNOT[wanted]}. Ask it through {WHERE[kind]}, "
        f"or name a model that does (see GET /v1/models).{remedy}",
        param="model",
    )


def models_of_kind(
    alias: str, wanted: WorkerKind, models: Sequence[str], workers: Mapping[str, Iterable[Heartbeat]]
) -> tuple[str, ...]:
    """Return the models of an alias that may be of the wanted kind. Raises NotSupported if there are none."""
    found = tuple(model for model in models if _is_kind(wanted, {beat.kind for beat in workers.get(model, ())}))
    if not found:
        check_kind(alias, wanted, workers[models[0]])
    return found


def _is_kind(wanted: WorkerKind, kinds: Set[WorkerKind]) -> bool:
    return not kinds or wanted in kinds


Workers = Mapping[str, Iterable[Heartbeat]]
"""Model -> its workers; models without workers may be missing."""


def default_name(defaults: Defaults, job: Job) -> str:
    """Return the model name that is the catalog's default for a job; empty if there is no default."""
    return {
        "chat": defaults.chat,
        "embed": defaults.embed,
        "rerank": defaults.rerank,
        "infill": defaults.infill,
    }[job] or ""


def capable_models(job: Job, models: Iterable[str], workers: Workers) -> frozenset[str]:
    """Return the models that may be able to do a job. A model without workers counts, as its kind is not known yet."""
    return frozenset(model for model in models if _can_do(job, tuple(workers.get(model, ()))))


def only_model(models: Set[str], workers: Workers) -> str:
    """Return the model if there is only one, or if only one has workers; otherwise an empty string."""
    served = models if len(models) == 1 else {model for model in models if any(True for _ in workers.get(model, ()))}
    return next(iter(served)) if len(served) == 1 else ""


def _can_do(job: Job, beats: tuple[Heartbeat, ...]) -> bool:
    kind = KIND_OF[job]
    return not beats or any(beat.kind == kind and (job != "infill" or beat.infill) for beat in beats)


OPENING_CHARS = 1024
"""Characters of an infill's prefix that identify its conversation: while a text is edited, its beginning stays."""

WHOLE_CHARS, END_CHARS = 64 << 10, 128
"""The first texts of a conversation are hashed whole, up to WHOLE_CHARS characters together. Of the text that exceeds
this and of each later one, only the length and END_CHARS at either end are hashed: hashing 8 MiB, or as many tokens,
would hold up the event loop for tens of milliseconds."""
WHOLE_ITEMS, END_ITEMS = 4096, 256
"""At most WHOLE_ITEMS messages are hashed. Of a prompt of more parts, only their number and END_ITEMS at each end."""

_END = b"\x00"


def rank_targets(targets: Sequence[Target], conversation: str) -> tuple[str, ...]:
    """Return the names of the models in the order to try them for this conversation; models of weight 0 are left out.

    `conversation`: the conversation's hash; empty: the models are sorted by weight, the greatest first."""
    if conversation:
        ranked = sorted(targets, key=lambda target: -_draw(target, conversation))
    else:
        ranked = sorted(targets, key=lambda target: -target.weight)
    return tuple(target.model for target in ranked if target.weight)


def conversation_of(request: GenerateRequest, team: str, session: str) -> str:
    """Return a hash that is the same in all turns of a conversation, and almost never the same for two users.

    `session`: the caller's own name for the conversation; empty: the texts at its beginning are hashed."""
    named = blake2b(team.encode() + _END, digest_size=16)
    left = WHOLE_CHARS
    for text in ("session", session) if session else _opening_texts(request):
        left -= len(text)
        named.update((text if left >= 0 else _ends_of(text)).encode() + _END)
    return named.hexdigest()


def _opening_texts(request: GenerateRequest) -> Iterator[str]:
    """Yield a chat's texts up to and including its first user message, as earlier texts can be the same in many chats.
    For another request, yield its prompt or, for an infill, the beginning of its prefix and its file names."""
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
    """Return the parts of a prompt that identify it: all or, if there are many, both ends and the number."""
    if isinstance(prompt, str):
        return (prompt,)
    if len(prompt) <= WHOLE_ITEMS:
        return prompt
    return (*prompt[:END_ITEMS], len(prompt), *prompt[-END_ITEMS:])


def _ends_of(text: str) -> str:
    """Return the whole text if it is short, otherwise both ends and the length, which nearly always identify it."""
    return text if len(text) <= 2 * END_CHARS else f"{text[:END_CHARS]}\0{len(text)}\0{text[-END_CHARS:]}"


def _infill_texts(infill: Infill) -> Iterator[str]:
    yield infill.prefix[:OPENING_CHARS]
    yield from (file.name for file in infill.files)


def _draw(target: Target, conversation: str) -> float:
    """Return a model's score for a conversation; the conversation goes to the model with the highest score. Each model
    gets as many conversations as its share of the weights.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005). When a weight
    changes, no more conversations change their model than necessary."""
    digest = blake2b(target.model.encode() + _END + conversation.encode(), digest_size=8).digest()
    between_0_and_1 = ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)
    return -target.weight / math.log(between_0_and_1)


MAX_NAMES_TOLD = 20

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class ResolvedName(NamedTuple):
    """The name that a call uses, and the model behind this name."""

    name: str
    model: str
    stands_in: bool = False
    """Whether `name` replaces an unknown name that the caller sent: the catalog may let such calls use a default."""


class ModelNames:
    """Maps every name to its model. A model's own name is an alias of itself.

    A model that workers serve has a name even if it is not in the catalog, so that a worker started alone is reachable.
    So has a LoRA adapter (name -> base model), if nothing else has its name. A key that is limited to some names needs
    the adapter's own name among them: the base model's name does not give access to its adapters. A name with several
    models maps to the model of greatest weight; `chain` returns the others too."""

    def __init__(self, catalog: Catalog | None) -> None:
        self.models = frozenset(model.name for model in catalog.models) if catalog is not None else frozenset()
        """Names of the models in the catalog."""
        self.tags = {model.name: model.tags for model in catalog.models} if catalog is not None else {}
        """Model -> its tags in the catalog."""
        self.meant = frozenset(model.name for model in catalog.models if model.policy.min) if catalog else frozenset()
        """Models for which the catalog asks for at least one worker at all times."""
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
        """Return name -> model, sorted by name. If several things share a name, the catalog takes precedence, then
        the models of the fleet, then adapters."""
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
        """Return the model behind a name. `complete`: whether the gateway has read all models that the fleet serves.

        Raises ModelNotFound for an unknown name (Unavailable if not `complete`), and PermissionDenied. The error lists
        the names that the key may use, except for Unavailable."""
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
        """Return the name and model for a call. `name`: the model name in the call; empty: the call names none.

        `job`: the work that the call asks for; None: it only asks about a model. `strict`: accept only a known name or,
        if the call has none, the only model that there is. Raises what `resolve` raises; without a name also
        InvalidRequest and NotSupported."""
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
        """Return the models behind a name of the catalog: first the model for this conversation, then its fallbacks."""
        entry = self._chains.get(name)
        if entry is None:
            return (self._fixed[name],)
        found = list(rank_targets(entry.shares(), conversation))
        for fallback in entry.fallbacks:
            found += (model for model in self.chain(fallback, conversation) if model not in found)
        return tuple(found)

    def is_adapter(self, name: str, fleet_models: Iterable[str], adapters: Mapping[str, str]) -> bool:
        """Return whether a known name is the name of an adapter."""
        return name in adapters and name not in self._fixed and name not in fleet_models


def _check_known(name: str, names: Mapping[str, str], *, complete: bool) -> None:
    """Raise Unavailable if a name is unknown and not all models of the fleet have been read (`complete`)."""
    if not complete and name not in names:
        message = "This gateway has not read yet which models there are. Send the request again."
        raise Unavailable(message)


def _only(usable: Mapping[str, str], workers: Workers, job: Job | None, *, strict: bool) -> str:
    """Return a name of the only model that can do the job or, failing that, of the only model that there is; else "".

    The only model is returned even if it can't do the job, so that the error can say so. `job` None: the call only asks
    about a model; the only one that can chat is preferred. `strict`: return the only model, whatever it can do."""
    models = frozenset(usable.values())
    found = "" if strict else only_model(capable_models(job or "chat", models, workers), workers)
    if not found and (strict or job is None or len(models) == 1):
        found = only_model(models, workers)
    return found if found in usable else next((name for name, model in usable.items() if model == found), "")


def _missing_model_error(
    usable: Mapping[str, str], workers: Workers, job: Job | None
) -> InvalidRequest | ModelNotFound | NotSupported:
    """Return the error for a call without a model name if none can be chosen for it."""
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
