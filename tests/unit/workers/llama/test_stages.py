"""Which stages a sampler has, for which settings."""

from __future__ import annotations

import dataclasses

import pytest

from workers.llama.sampling.stages import (
    ORDER,
    Settings,
    draw_s,
    is_greedy,
    looks_far,
    settled,
    sorts_all,
    working_stages,
)
from workers.protocol.requests import SamplerName, Sampling

EVERYTHING = Sampling(
    repeat_penalty=1.1,
    dry_multiplier=0.8,
    top_n_sigma=1.0,
    typical_p=0.9,
    xtc_probability=0.5,
    temperature=0.7,
)


def stages(sampling: Sampling) -> tuple[SamplerName, ...]:
    return working_stages(Settings.of(sampling, 100))


def greedy(sampling: Sampling) -> bool:
    settings = Settings.of(sampling, 100)
    return is_greedy(settings, working_stages(settings))


def test_every_parameter_has_a_default() -> None:
    assert {field.name for field in dataclasses.fields(Settings)} == set(Sampling.__struct_fields__)


def test_the_defaults_have_four_stages_at_work() -> None:
    assert stages(Sampling()) == ("top_k", "top_p", "min_p", "temperature")


def test_everything_at_work_stands_in_the_default_order() -> None:
    assert stages(EVERYTHING) == ORDER


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (Sampling(top_k=0), "top_k"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(top_p=1.0), "top_p"),
        (Sampling(min_p=0.0), "min_p"),
        (Sampling(temperature=1.0), "temperature"),
        (Sampling(repeat_penalty=2.0, repeat_last_n=0), "penalties"),
        (Sampling(repeat_last_n=10), "penalties"),
        (Sampling(dry_multiplier=1.0, dry_penalty_last_n=0), "dry"),
        (Sampling(xtc_probability=1.0, xtc_threshold=0.51), "xtc"),
        (Sampling(typical_p=1.0), "typ_p"),
        (Sampling(top_n_sigma=0.0), "top_n_sigma"),
    ],
)
def test_what_would_change_nothing_is_left_out(sampling: Sampling, name: SamplerName) -> None:
    assert name not in stages(sampling)


def test_an_order_of_ones_own_leaves_the_others_out() -> None:
    assert stages(Sampling(samplers=("temperature", "top_k"))) == ("temperature", "top_k")


def test_a_stage_that_is_named_again_works_once() -> None:
    named_often: tuple[SamplerName, ...] = ("typ_p",) * 32 + ("top_k", "typ_p")
    assert stages(Sampling(samplers=named_often, typical_p=0.9)) == ("typ_p", "top_k")
    assert stages(Sampling(samplers=())) == ()


def test_mirostat_is_in_place_of_all_but_the_temperature() -> None:
    assert stages(Sampling(mirostat=2, dry_multiplier=1.0, samplers=("top_k",))) == ("temperature",)


@pytest.mark.parametrize(("asked", "taken"), [(-1, 100), (7, 7), (100, 100), (2**31 - 1, 100), (0, 0)])
def test_recent_tokens_are_at_most_the_context(asked: int, taken: int) -> None:
    settings = Settings.of(Sampling(repeat_last_n=asked, dry_penalty_last_n=asked), 100)
    assert (settings.repeat_last_n, settings.dry_penalty_last_n) == (taken, taken)


@pytest.mark.parametrize(("asked", "taken"), [(0.0, 1.75), (0.99, 1.75), (1.0, 1.0), (2.5, 2.5)])
def test_a_dry_base_below_1_stands_for_the_default(asked: float, taken: float) -> None:
    assert Settings.of(Sampling(dry_base=asked), 100).dry_base == taken


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=1e-30),
        Sampling(temperature=0, repeat_penalty=1.5, dry_multiplier=1.0, top_n_sigma=1.0),
        Sampling(temperature=0, mirostat=1, xtc_probability=1.0),
        Sampling(temperature=0, samplers=("temperature", "top_k")),
    ],
)
def test_temperature_0_is_greedy(sampling: Sampling) -> None:
    assert greedy(sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.01),
        Sampling(temperature=0, dynatemp_range=1.0),
        Sampling(temperature=0, xtc_probability=0.5),
        Sampling(temperature=0, typical_p=0.5),
        Sampling(temperature=0, samplers=("top_k",)),
        Sampling(temperature=0, repeat_penalty=1.5, samplers=("top_k", "penalties", "temperature")),
        Sampling(temperature=0, repeat_penalty=1.5, samplers=("temperature", "penalties")),
        Sampling(temperature=0, samplers=("top_k", "temperature", "adaptive_p")),
        Sampling(temperature=0, samplers=("top_k", "infill", "temperature")),
    ],
)
def test_temperature_0_is_not_greedy_where_another_stage_has_a_say(sampling: Sampling) -> None:
    assert not greedy(sampling)


@pytest.mark.parametrize(
    ("sampling", "slow"),
    [
        (Sampling(), False),
        (Sampling(top_k=0), True),
        (Sampling(top_k=0, top_p=1.0), False),
        (Sampling(top_k=100_000, top_p=1.0), True),
        (Sampling(typical_p=0.5, xtc_probability=1.0, dynatemp_range=1.0), False),
        (Sampling(top_k=0, typical_p=0.5), True),
        (Sampling(top_k=100_000, xtc_probability=0.5), True),
        (Sampling(top_k=0, dynatemp_range=0.5), True),
        (Sampling(samplers=("typ_p", "top_k"), typical_p=0.5), True),
        (Sampling(mirostat=1), True),
    ],
)
def test_settings_that_sort_the_whole_vocabulary_are_known(sampling: Sampling, slow: bool) -> None:
    settings = Settings.of(sampling, 100)
    assert sorts_all(settings, working_stages(settings)) is slow


@pytest.mark.parametrize(
    ("sampling", "far"),
    [
        pytest.param(Sampling(dry_multiplier=0.8), False, id="64 tokens"),
        pytest.param(Sampling(dry_multiplier=0.8, dry_penalty_last_n=4096), False, id="usual breakers"),
        pytest.param(Sampling(dry_multiplier=0.8, dry_penalty_last_n=-1), True, id="a whole context"),
        pytest.param(Sampling(dry_penalty_last_n=-1), False, id="no penalty"),
        pytest.param(
            Sampling(dry_multiplier=0.8, dry_penalty_last_n=4096, dry_sequence_breakers=("-----a",)), True, id="others"
        ),
    ],
)
def test_dry_that_compares_with_many_tokens_is_known(sampling: Sampling, far: bool) -> None:
    settings = Settings.of(sampling, 32_768)
    assert looks_far(settings, working_stages(settings)) is far


@pytest.mark.parametrize(
    ("sampling", "expected_ms"),
    [
        (Sampling(), 0.0),
        (Sampling(temperature=0), 0.0),
        (Sampling(frequency_penalty=0.5), 1.5),
        (Sampling(frequency_penalty=0.5, temperature=0), 1.5),
        (Sampling(top_k=0, top_p=1.0), 4.5),
        (Sampling(top_n_sigma=9.0), 4.5),
        (Sampling(samplers=()), 4.5),
        (Sampling(samplers=("min_p", "top_k"), repeat_penalty=1.1), 4.5),
        (Sampling(top_k=0, presence_penalty=0.1), 16.5),
        (Sampling(mirostat=2), 15.0),
        (Sampling(dry_multiplier=1.0, dry_penalty_last_n=-1), 22.9),
    ],
)
def test_what_a_draw_takes_is_known_before_it_is_timed(sampling: Sampling, expected_ms: float) -> None:
    settings = Settings.of(sampling, 32_768)
    assert round(draw_s(settings, working_stages(settings), 150_000) * 1e3, 1) == expected_ms


def test_what_a_call_runs_with_names_every_parameter() -> None:
    told = settled(Sampling(temperature=0.5, repeat_last_n=-1, dry_base=0.5, seed=7), 100)
    assert None not in dataclasses.astuple(Settings.of(told, 100))
    assert (told.temperature, told.repeat_last_n, told.dry_base, told.seed) == (0.5, 100, 1.75, 7)
    assert (told.top_k, told.samplers) == (40, ORDER)
    assert settled(told, 100) == told


def test_the_seed_that_stands_for_any_is_told_as_the_one_in_its_place() -> None:
    assert settled(Sampling(seed=0xFFFFFFFF), 100).seed == 0xFFFFFFFE
    assert settled(Sampling(), 100).seed is None
