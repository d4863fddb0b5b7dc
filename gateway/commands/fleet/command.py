"""`paddock status`, `ps`, `top`, `stop`, `restart`: shows what runs, stops models, renews workers, by the admin API."""

from __future__ import annotations

import msgspec

from gateway.api.overview.rows import Overview
from gateway.client.calls import unload_model
from gateway.commands.accounts.api import Answer, path_of
from gateway.commands.accounts.parser import Call, Result, Unusable, add_command
from gateway.commands.fleet import screen
from gateway.commands.fleet.pages import Slots, models_table, read_overview, slots_table, status_page

FLEET_PATH = "/admin/fleet"
MOST_MODELS = 8
"""Maximum number of models whose slots are asked for at once (`GET /admin/fleet`)."""


def add_status(parsers: object, name: str, about: str) -> None:
    add_command(parsers, name, _status, about)


def add_ps(parsers: object, name: str, about: str) -> None:
    add_command(parsers, name, _ps, about)


def add_top(parsers: object, name: str, about: str) -> None:
    parser = add_command(parsers, name, _top, about)
    parser.add_argument("--every", type=_read_seconds, default=1.0, metavar="SECONDS", help="default: 1")


def add_stop(parsers: object, name: str, about: str) -> None:
    parser = add_command(parsers, name, _stop, about)
    parser.add_argument("model", metavar="MODEL", help="as `paddock ps` names it")


def add_restart(parsers: object, name: str, about: str) -> None:
    parser = add_command(parsers, name, _restart, about)
    parser.add_argument("worker", metavar="WORKER", help="as `paddock status` names it")
    parser.add_argument("--dry-run", action="store_true", help="only says what it would do")


def _status(call: Call) -> Result:
    answer, overview, _ = _look(call)
    return Result(answer, status_page(overview, call.address, call.width))


def _ps(call: Call) -> Result:
    answer, overview, _ = _look(call)
    listed = models_table(overview, call.width, is_running_only=True)
    return Result(answer, listed or "No model is loaded; `paddock status` lists those that there are.")


def _top(call: Call) -> Result:
    if call.width is None or call.options.json:
        raise Unusable("top: needs a terminal; `paddock status --json` prints the same figures once")
    before: Slots = {}
    at = 0.0

    def page(width: int, height: int) -> str:
        nonlocal before, at
        _, overview, _ = _look(call)
        busy = [name for name, model in overview.models.items() if model.slots_busy][:MOST_MODELS]
        slots: Slots = {}
        if busy:
            _, overview, slots = _look(call, slots=",".join(busy))
        head = status_page(overview, call.address, width)
        room = max(1, height - head.count("\n") - 5)
        calls, num_left = slots_table(slots, before, overview.at - at, width, most=room)
        before, at = slots, overview.at
        more = f"\n{num_left} more" if num_left else ""
        return f"{head}\n\n{calls}{more}"

    screen.show(page, call.options.every)
    return Result(None, "")


def _stop(call: Call) -> Result:
    call.api.send(unload_model(call.options.model))
    told = f"{call.options.model} is unloaded when its calls have ended. A call, or `paddock run`, loads it again"
    return Result(None, f"{told} if it loads on demand; `paddock status` shows what becomes of it.")


def _restart(call: Call) -> Result:
    worker = call.options.worker
    plan = call.api.get("/admin/plan", action="drain", worker=worker)
    told = "\n".join(plan.document["sentences"])
    if call.options.dry_run:
        return Result(plan, told)
    return Result(call.api.post(path_of("workers", worker, "drain")), told)


def _look(call: Call, **query: str) -> tuple[Answer, Overview, Slots]:
    """Return the overview, and the slots that were asked for. Raises ClientError, Unusable."""
    answer = call.api.get(FLEET_PATH, **query)
    try:
        overview, slots = read_overview(answer.document)
    except (msgspec.ValidationError, AttributeError):
        raise Unusable(f"{call.address} runs another version of Paddock; --json prints its answer") from None
    return answer, overview, slots


def _read_seconds(text: str) -> float:
    seconds = float(text)
    if not 0.2 <= seconds <= 3600:
        raise ValueError(text)
    return seconds
