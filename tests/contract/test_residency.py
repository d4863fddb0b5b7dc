"""The `residency` of models, `groups` and `models_max` of a catalog: what contradicts itself is told with its place."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.catalog.names import ModelNames
from workers.models.catalog import Catalog, CatalogError, convert
from workers.protocol.residency import MAX_MODELS
from workers.residency.policy import Residency


def catalog(*entries: dict[str, Any], **fields: Any) -> Catalog:
    """Return a catalog with models `a`, `b` ... that have these fields."""
    models = [{"name": name, "path": f"{name}.gguf", **entry} for name, entry in zip("abcdef", entries, strict=False)]
    return convert({"models": models, **fields}, "models.yaml")


def member(**fields: Any) -> dict[str, Any]:
    return {"residency": {"group": "g", **fields}}


def test_without_residency_all_workers_stay_from_the_start() -> None:
    assert catalog({"workers": 3}).models[0].policy == Residency(min=3, max=3)
    assert catalog({}).models[0].policy == Residency(min=1, max=1)
    assert catalog({"workers": 0}).models[0].policy.most == 0


def test_with_residency_workers_are_the_most() -> None:
    assert catalog({"residency": {}}).models[0].policy == Residency(min=0, max=1)
    assert catalog({"workers": 3, "residency": {"min": 1}}).models[0].policy == Residency(min=1, max=3)
    assert catalog({"residency": {"max": 4}}).models[0].policy == Residency(min=0, max=4)


def test_a_machine_has_no_more_models_than_it_can_tell_of() -> None:
    """With more nothing of what a supervisor tells could be read, and no call loaded a model."""
    many = [{"name": f"m{number}", "path": "m.gguf", "residency": {}} for number in range(MAX_MODELS)]
    assert len(convert({"models": many}, "models.yaml").models) == MAX_MODELS
    with pytest.raises(CatalogError, match="4,097 models have `residency`"):
        convert({"models": [*many, {"name": "more", "path": "m.gguf", "residency": {}}]}, "models.yaml")


def test_gateways_are_ready_without_models_that_calls_load() -> None:
    names = ModelNames(catalog({}, {"residency": {"preload": True}}, {"residency": {"min": 1}}, {"workers": 0}))
    assert names.models == {"a", "b", "c", "d"}
    assert names.meant == {"a", "c"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"residency": {"idle": "sleep", "ttl_s": 9, "min": 1}}, r"models\[0\] .*: .* is sleep, and `min` keeps"),
        ({"residency": {"min": 2}}, r"models\[0\] .*: `residency.min` is 2 and at most 1 may run"),
        ({"residency": {"min": 3, "max": 2}}, "lower `min`, or raise `residency.max`"),
        ({"residency": {"max": 0}}, "residency.max"),
        ({"residency": {"max": 257}}, "residency.max"),
        ({"residency": {"ttl_s": -1}}, "residency.ttl_s"),
        ({"residency": {"priority": 101}}, "residency.priority"),
        ({"residency": {"min_resident_s": -1}}, "residency.min_resident_s"),
        ({"residency": {"tll_s": 5}}, r"models\[0\] .*: residency: unknown field `tll_s`"),
        ({"workers": 3, "residency": {"max": 4}}, "`workers` is 3 and `residency.max` 4; remove `workers`"),
        ({"workers": 0, "residency": {}}, "`workers` is 0, so the model has none here"),
        ({"residency": {"pinned": True, "ttl_s": 60}}, "`residency.pinned` keeps the model, `ttl_s` lets it leave"),
        ({"residency": {"preload": True, "min": 1}}, "`residency.preload` has no use beside a `min`"),
        (
            {"residency": {"group": "g"}},
            r"models\[0\] \(a\): residency.group: no group is named 'g'; the catalog has no",
        ),
    ],
)
def test_a_residency_that_contradicts_itself(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        catalog(entry)


@pytest.mark.parametrize(
    ("entries", "fields", "message"),
    [
        ([{}], {"groups": {"g": {"at_once": 1}}}, "groups.g: no model names this group as its `residency.group`"),
        ([member()], {"groups": {"g": {}}}, "groups.g: it changes nothing; set `at_once`, `exclusive` or `together`"),
        ([member()], {"groups": {"h": {"at_once": 1}}}, "no group is named 'g'; use one of: h"),
        ([member()], {"groups": {"g": {"at_onc": 1}}}, r"groups.g: unknown field `at_onc`"),
        ([member()] * 2, {"groups": {"g": {"at_once": 1, "together": True}}}, "`together` loads 2 members, and"),
        ([member(min=1)] * 2, {"groups": {"g": {"at_once": 1}}}, "`at_once` is 1, and a, b stay loaded; raise it"),
        ([member(min=1), member()], {"groups": {"g": {"at_once": 1}}}, "a stay loaded, so that b never would be"),
        (
            [member(pinned=True), member()],
            {"groups": {"g": {"together": True}}},
            "need the same `min`, `max`, `pinned`",
        ),
        ([member(min=1)], {"groups": {"g": {"exclusive": True}}}, "it is exclusive and a stays loaded"),
        ([{}, {}], {"models_max": 1}, r"models_max: it is 1, and 2 models stay loaded \(a, b\)"),
        ([{}], {"models_max": -1}, "models_max"),
    ],
)
def test_groups_that_contradict_their_members(
    entries: list[dict[str, Any]], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CatalogError, match=message):
        catalog(*entries, **fields)


def test_groups_that_fit() -> None:
    found = catalog(member(), member(), {}, groups={"g": {"at_once": 1, "exclusive": True}}, models_max=2)
    assert found.groups["g"].at_once == 1
    assert [model.policy.stays for model in found.models] == [False, False, True]
