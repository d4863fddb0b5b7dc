"""One state of a model from those of all machines, and what callers are told of it."""

from __future__ import annotations

import msgspec
import pytest

from gateway.api.openai.model_news import events_of
from gateway.api.openai.models import status_object
from gateway.api.operations.explain import residency_object
from gateway.back_pressure import model_not_loaded, no_worker_in_time, retry_after
from gateway.registry.model_states import Refusal, merged
from workers.protocol.residency import Detail, ModelState, Why, encode

LOADED, UNLOADED = ModelState(status="loaded"), ModelState(status="unloaded")
LOADING = ModelState(status="loading", progress=0.25, why=Why.of("2 calls wait"))
FAILED = ModelState(status="failed", why=Why.of("out of memory"), retry_at=1000.0)
SLEEPING = ModelState(status="sleeping", why=Why.of("it sleeps"))
TOO_LARGE = ModelState(status="unloaded", why=Why.of("no machine has the memory"), is_hopeless=True)


def test_the_best_state_is_the_models() -> None:
    states = [UNLOADED, FAILED, LOADING, LOADED]
    assert [merged(states[: number + 1]).status for number in range(4)] == ["unloaded", "failed", "loading", "loaded"]
    assert merged([FAILED, UNLOADED]).why.whole == "out of memory"
    assert merged([LOADING, ModelState(status="loading", progress=0.5)]).progress == 0.5
    assert merged([FAILED, ModelState(status="failed", retry_at=900.0)]).retry_at == 900.0


def test_a_model_sleeps_where_no_machine_has_it_loaded_or_loads_it() -> None:
    assert merged([UNLOADED, SLEEPING, FAILED]).status == "sleeping"
    assert merged([SLEEPING, LOADING]).status == "loading"


def test_a_model_is_hopeless_only_where_all_machines_say_so() -> None:
    assert merged([TOO_LARGE, TOO_LARGE]).is_hopeless
    assert not merged([TOO_LARGE, UNLOADED]).is_hopeless


def test_a_model_that_is_not_tried_again_has_no_time() -> None:
    assert Refusal(TOO_LARGE, 0.0).retry_in_s(990.0) == 0.0
    assert Refusal(FAILED, 0.0).retry_in_s(990.0) == 10.0
    assert Refusal(FAILED, 0.0).retry_in_s(2000.0) == 1.0, "it is tried at any moment"


def test_the_error_names_model_reason_and_remedy() -> None:
    error = model_not_loaded("big", "out of memory", 9.2)
    assert (error.status, error.code) == (503, "model_not_loaded")
    assert "'big' can't be loaded now: out of memory. It is tried again in 10 s" in error.message
    assert retry_after(error) == 10
    error = model_not_loaded("big", "x" * 5000, 0.0)
    assert "Waiting alone does not change that" in error.message
    assert retry_after(error) == 30
    assert retry_after(model_not_loaded("big", "", 1e9)) == 3600


def test_a_wait_that_was_too_long_has_its_reason() -> None:
    error = no_worker_in_time("big", 30.0, "memory is being freed by small.")
    assert error.message.endswith("in 30.0 s (start_timeout_s): memory is being freed by small; try again later")
    assert no_worker_in_time("big", 30.0).message.endswith("(start_timeout_s); start one, or try again later")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (LOADED, {"value": "loaded"}),
        (UNLOADED, {"value": "unloaded"}),
        (ModelState(status="loading"), {"value": "loading"}),
        (SLEEPING, {"value": "sleeping", "reason": "it sleeps"}),
        (
            LOADING,
            {
                "value": "loading",
                "progress": {"stages": ["text_model"], "current": "text_model", "value": 0.25},
                "reason": "2 calls wait",
            },
        ),
        (FAILED, {"value": "unloaded", "failed": True, "reason": "out of memory", "retry_at": 1000}),
        (TOO_LARGE, {"value": "unloaded", "reason": "no machine has the memory"}),
    ],
)
def test_a_status_is_llama_servers(state: ModelState, expected: dict[str, object]) -> None:
    assert status_object(state, None) == expected


def test_only_what_has_changed_is_told() -> None:
    before = {"a": {"value": "loaded"}, "b": {"value": "unloaded"}, "c": {"value": "loaded"}}
    now = {"a": {"value": "loaded"}, "b": {"value": "loading", "reason": "a call waits"}, "d": {"value": "unloaded"}}
    assert [*events_of(before, now)] == [
        {"model": "b", "event": "model_status", "data": {"status": "loading", "reason": "a call waits"}},
        {"model": "d", "event": "model_status", "data": {"status": "unloaded"}},
        {"model": "c", "event": "model_remove"},
    ]
    assert not [*events_of(now, now)]


def test_admins_are_told_of_each_machine() -> None:
    assert residency_object({}, 990.0) is None
    told = residency_object({"host1": FAILED, "host2": UNLOADED}, 990.0)
    assert told is not None
    assert (told["status"], told["why"], told["retry_in_s"]) == ("failed", "out of memory", 10.0)
    assert told["machines"]["host2"] == {
        "status": "unloaded",
        "progress": None,
        "why": "",
        "is_hopeless": False,
        "retry_in_s": None,
        "failures": 0,
        "exit": None,
        "log": [],
    }


def test_a_reason_names_only_models_that_may_be_told_of() -> None:
    why = Why.of("memory for ", ("a",), " is being freed by ", ("b", "c", "d"), Detail(": c.gguf"))
    assert why.whole == "memory for a is being freed by b, c, d: c.gguf"
    assert why.shown({"a", "b", "c"}) == "memory for a is being freed by b, c, another model"
    assert why.shown({"a"}) == "memory for a is being freed by 3 other models"
    assert why.shown(()) == "memory for another model is being freed by 3 other models"
    assert msgspec.json.decode(encode(why), type=Why) == why


CRASHED = ModelState(
    status="failed",
    why=Why.of("SIGSEGV: x"),
    retry_at=1000.0,
    num_failures=3,
    exit_code=-11,
    log=("/srv/a: one", "two"),
)


def test_logs_are_for_admins_alone() -> None:
    told = residency_object({"host1": CRASHED, "host2": UNLOADED}, 990.0)
    assert told is not None
    assert (told["failures"], told["exit"]) == (3, "SIGSEGV (it used memory that it does not have)")
    assert "log" not in told
    assert [told["machines"][name]["log"] for name in ("host1", "host2")] == [["/srv/a: one", "two"], []]
    shown = status_object(merged([CRASHED, UNLOADED]), None)
    assert shown == {
        "value": "unloaded",
        "failed": True,
        "exit_code": -11,
        "failures": 3,
        "reason": "SIGSEGV: x",
        "retry_at": 1000,
    }


def test_a_model_that_failed_is_shown_as_failed_until_it_loads() -> None:
    """Though its pause is over, and the next call loads it again."""
    waiting = ModelState(status="unloaded", num_failures=1, exit_code=71, why=Why.of("exit code 71"))
    assert status_object(waiting, None) == {
        "value": "unloaded",
        "failed": True,
        "exit_code": 71,
        "failures": 1,
        "reason": "exit code 71",
    }
    assert "failed" not in status_object(ModelState(status="loading", num_failures=1, progress=0.5), None)
