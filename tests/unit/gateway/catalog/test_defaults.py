"""Calls that name no model, or one that nobody has."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from gateway.call import Principal
from gateway.catalog.names import ModelNames, ResolvedName
from gateway.errors import InvalidRequest, ModelNotFound, NotSupported, PaddockError, PermissionDenied, Unavailable
from tests.support.pool import heartbeat
from workers.models.catalog import Catalog, Defaults, Job
from workers.models.spec import ModelSpec
from workers.protocol.heartbeat import Heartbeat, WorkerKind

EVERYONE = Principal("k", "t", None, False)
MODELS = ("big", "small", "coder", "vectors", "ranks")
JOBS: tuple[Job, ...] = ("chat", "embed", "rerank", "infill")


def of(*usable: str) -> Principal:
    return Principal("k", "t", frozenset(usable), False)


def beat(model: str, kind: WorkerKind = "generate", *, infill: bool = False) -> Heartbeat:
    return replace(heartbeat("w", model=model), kind=kind, infill=infill)


FLEET = {
    "big": (beat("big"),),
    "small": (beat("small"),),
    "coder": (beat("coder", infill=True),),
    "vectors": (beat("vectors", "embed"),),
    "ranks": (beat("ranks", "rank"),),
}


def catalog(*, default: Defaults | None = None, unknown: bool = False) -> Catalog:
    return Catalog(
        models=tuple(ModelSpec(name=name, path="x.gguf") for name in MODELS),
        aliases={"house": "big"},
        default=default or Defaults(),
        unknown_model="default" if unknown else "refuse",
    )


def taken(
    names: ModelNames,
    job: Job | None,
    *,
    name: str = "",
    by: Principal = EVERYONE,
    served: Iterable[str] = MODELS,
    strict: bool = False,
    complete: bool = True,
) -> ResolvedName:
    workers = {model: FLEET[model] for model in served}
    return names.resolve_call(name, by, MODELS, {}, workers, job=job, strict=strict, complete=complete)


def test_the_only_model_that_can_do_the_job_does_it() -> None:
    names = ModelNames(catalog())
    assert [taken(names, job).model for job in JOBS[1:]] == ["vectors", "ranks", "coder"]
    with pytest.raises(
        InvalidRequest, match=r"`model` is missing\. Use one of: big, coder, house, small\. .*`default.chat`"
    ):
        taken(names, "chat")


def test_a_question_about_a_model_goes_to_the_one_that_chats() -> None:
    assert taken(ModelNames(None), None, served=("big", "vectors"), by=of("big", "vectors")).model == "big"
    assert taken(ModelNames(None), None, by=of("vectors")).model == "vectors"
    assert taken(ModelNames(catalog(default=Defaults(chat="small"))), None).model == "small"
    with pytest.raises(InvalidRequest, match=r"Use one of: ranks, vectors\. .*`default.chat`"):
        taken(ModelNames(None), None, by=of("ranks", "vectors"))


def test_the_catalogs_word_goes_first() -> None:
    names = ModelNames(catalog(default=Defaults(chat="house", embed="vectors", rerank="ranks", infill="small")))
    assert [taken(names, job).name for job in JOBS] == ["house", "vectors", "ranks", "small"]
    assert taken(names, "chat") == ("house", "big", False)
    assert taken(names, "chat", served=()).name == "house", "its calls wait for the first worker"
    assert taken(names, "chat", complete=False).name == "house"


def test_only_models_that_the_key_may_use_count() -> None:
    names = ModelNames(catalog(default=Defaults(chat="house")))
    assert taken(names, "chat", by=of("big", "vectors")).name == "big"
    assert taken(names, "chat", by=of("small", "coder"), served=("small",)).name == "small"
    with pytest.raises(InvalidRequest, match=r"Use one of: coder, small\."):
        taken(names, "chat", by=of("small", "coder"))
    with pytest.raises(ModelNotFound, match="no model that this key may use"):
        taken(names, "chat", by=of())


def test_the_only_model_goes_by_a_name_that_the_key_may_use() -> None:
    assert taken(ModelNames(catalog()), "chat", by=of("house")) == ("house", "big", False)
    assert taken(ModelNames(catalog()), "chat", by=of("house", "big")).name == "big"


def test_the_only_model_is_told_what_it_can_not_do_by_its_name() -> None:
    assert taken(ModelNames(catalog()), "embed", by=of("big")).model == "big"
    for job, what in (("embed", "make embeddings"), ("rerank", "rank documents"), ("infill", "fill in code")):
        with pytest.raises(NotSupported, match=f"no model that this key may use can {what}"):
            taken(ModelNames(catalog()), job, by=of("big", "small"))  # type: ignore[arg-type]


def test_models_without_workers_may_do_any_job() -> None:
    names = ModelNames(catalog())
    assert taken(names, "embed", by=of("big", "coder"), served=("big",)).model == "coder"
    with pytest.raises(InvalidRequest, match=r"default\.embed"):
        taken(names, "embed", by=of("big", "coder"), served=())


def test_a_fleet_that_was_not_read_yet_may_have_others() -> None:
    with pytest.raises(Unavailable):
        taken(ModelNames(catalog()), "embed", complete=False)


def test_an_unknown_name_is_refused_unless_the_catalog_lets_it_fall_back() -> None:
    default = Defaults(chat="house")
    for names in (ModelNames(None), ModelNames(catalog(default=default))):
        with pytest.raises(ModelNotFound):
            taken(names, "chat", name="gpt-9")
    names = ModelNames(catalog(default=default, unknown=True))
    assert taken(names, "chat", name="gpt-9") == ("house", "big", True)
    assert taken(names, "embed", name="ada") == ("vectors", "vectors", True)
    assert taken(names, None, name="gpt-9") == ("house", "big", True)
    assert taken(names, "chat", name="small") == ("small", "small", False)


REFUSALS: tuple[tuple[Principal, str, type[PaddockError]], ...] = (
    (of("small", "coder"), "gpt-9", ModelNotFound),
    (of("gpt-9"), "gpt-9", ModelNotFound),
    (of("vectors"), "big", PermissionDenied),
    (of("vectors"), "house", PermissionDenied),
)


@pytest.mark.parametrize(("key", "name", "error"), REFUSALS)
def test_a_fallback_is_no_way_round_the_names_of_a_key(key: Principal, name: str, error: type[PaddockError]) -> None:
    names = ModelNames(catalog(default=Defaults(chat="house"), unknown=True))
    with pytest.raises(error) as caught:
        taken(names, "chat", name=name, by=key)
    told = set(caught.value.message.replace(".", "").replace(",", "").split()) & {*MODELS, "house"}
    assert told <= (key.aliases or set())


def test_nothing_falls_back_where_a_name_is_needed() -> None:
    names = ModelNames(catalog(default=Defaults(chat="house"), unknown=True))
    with pytest.raises(ModelNotFound):
        taken(names, None, name="gpt-9", strict=True)
    with pytest.raises(InvalidRequest):
        taken(names, None, strict=True)
    assert taken(names, None, strict=True, by=of("vectors")).model == "vectors"
    with pytest.raises(Unavailable):
        taken(names, "chat", name="gpt-9", complete=False)
