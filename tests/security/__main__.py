"""Try attacks on a Paddock, one after the other, each beside a caller of another team.

    python -m tests.security                              a fleet of its own, every attack for 60 s
    python -m tests.security --list
    python -m tests.security --only nested-parts --seconds 10
    python -m tests.security --url http://127.0.0.1:8080 --model small
        (with the environment variables ATTACKER_KEY and VICTIM_KEY, and --pid NAME=PID for processes of this machine)

Only attack what is yours. Exits with 1 when an attack gets through.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping

from tests.security.attack import Attack, Fleet, Target
from tests.security.attacks import all_attacks
from tests.security.fleet import attacked_fleet
from tests.security.trial import Bounds, Outcome, try_attacks, undisturbed, warm_up

SECONDS = 60.0
REST_S = 60.0
WARM_UP_S = 10.0
"""What is loaded and kept when it is first needed is no growth under attack."""

TOLD_STOLEN = 0.01
"""A share of the processors' time that is worth telling."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security", description="Try attacks on a Paddock.")
    parser.add_argument("--list", action="store_true", help="show the attacks")
    parser.add_argument("--only", default="", help="some attacks, by name, with commas between them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each goes on")
    parser.add_argument("--rest", type=float, default=REST_S, help="seconds to give memory back in; 0: any")
    parser.add_argument("--url", default="", help="a gateway that runs already")
    parser.add_argument("--model", default="", help="the model to ask for there")
    parser.add_argument("--worker-url", default="", help="a worker's own address, for attacks on its port")
    parser.add_argument("--authority", default="", help="the file of who vouches for its certificate (TLS)")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID", help="a process to watch")
    asked = parser.parse_args()
    chosen = _chosen(asked.only)
    if asked.list:
        for attack in chosen:
            print(f"{attack.name:28} {attack.about}")
        return 0
    bounds = Bounds(rest_s=asked.rest)
    if asked.url:
        pids = {name: int(pid) for name, _, pid in (each.partition("=") for each in asked.pid)}
        keys = (os.environ["ATTACKER_KEY"], os.environ["VICTIM_KEY"])
        target = Target(asked.url.rstrip("/"), asked.model, *keys, asked.worker_url.rstrip("/"), asked.authority)
        failed = asyncio.run(_try_all(chosen, target, asked.seconds, pids, bounds))
    else:
        failed = sum(_try_here(chosen, kind, asked.seconds, bounds) for kind in Fleet)
    print(f"{len(chosen)} attacks, {failed} got through")
    return 1 if failed else 0


def _try_here(chosen: list[Attack], kind: Fleet, seconds: float, bounds: Bounds) -> int:
    """Try those that are aimed at such a fleet, on one of their own; returns how many got through."""
    aimed = [attack for attack in chosen if attack.fleet is kind]
    if not aimed:
        return 0
    cores = os.sched_getaffinity(0)
    with attacked_fleet(kind, measured=True) as (target, pids):
        os.sched_setaffinity(0, {max(cores)})
        try:
            return asyncio.run(_try_all(aimed, target, seconds, pids, bounds))
        finally:
            os.sched_setaffinity(0, cores)


def _chosen(only: str) -> list[Attack]:
    names = [name for name in only.split(",") if name]
    known = {attack.name: attack for attack in all_attacks()}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no attack {unknown[0]}; --list shows them")
    return [known[name] for name in names] if names else list(known.values())


async def _try_all(
    attacks: list[Attack], target: Target, seconds: float, pids: Mapping[str, int], bounds: Bounds
) -> int:
    """Return how many got through."""
    failed = 0
    await warm_up(target)
    await undisturbed(target, WARM_UP_S)
    for attack in attacks:
        is_away = attack.needs_worker and not target.worker_url
        if is_away or (attack.fleet is Fleet.ENCRYPTED and not target.is_encrypted):
            continue
        calm = await undisturbed(target)
        outcome = await try_attacks([(attack, seconds)], target, calm, pids, bounds)
        complaints = outcome.complaints(bounds)
        failed += bool(complaints)
        print(_line(attack.name, outcome, complaints), flush=True)
    return failed


def _line(name: str, outcome: Outcome, complaints: list[str]) -> str:
    calm, attacked = outcome.calm, outcome.attacked
    figures = f"gap {calm.longest_gap_s * 1e3:.0f} -> {attacked.longest_gap_s * 1e3:.0f} ms"
    figures += f", TTFT p95 {calm.ttft_p95_s * 1e3:.0f} -> {attacked.ttft_p95_s * 1e3:.0f} ms"
    for process, memory in outcome.memory.items():
        figures += f", {process} {memory.quiet >> 20}/{memory.most >> 20}/{memory.after >> 20} MiB"
    if outcome.stolen >= TOLD_STOLEN:
        seen = f"{calm.seen_gap_s * 1e3:.0f} -> {attacked.seen_gap_s * 1e3:.0f} ms"
        figures += f", the host took {outcome.stolen:.0%} of the processors, gap with its pauses {seen}"
    told = "ok" if not complaints else "GOT THROUGH: " + "; ".join(complaints)
    return f"{name:28} {outcome.rounds[name]:6} rounds, {figures}: {told}"


if __name__ == "__main__":
    sys.exit(main())
