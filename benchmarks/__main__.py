"""`make bench`: every claim of the README, measured in one go; exits 1 when a bar is missed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from benchmarks import (
    admission,
    against_llama_server,
    capacity,
    constrained,
    dialects,
    engine,
    field,
    gateway_cpu,
    large_request,
    ledger,
    limits,
    many_streams,
    media,
    models,
    placement_cost,
    residency,
    routing_sim,
    scrape_cost,
    several_gateways,
    speculation,
    tokenising,
    tracing_cost,
    ttft_added,
    turns,
    usage_cost,
    viewers_cost,
)
from benchmarks.table import Row, print_rows

CLAIMS: dict[str, tuple[str, Callable[[int], list[Row]], int]] = {
    "gateway_cpu": ("gateway CPU per streamed token, 64 streams, a step every 20 ms", gateway_cpu.measure, 3),
    "field": ("gateways of the field behind one upstream, each on one core", field.measure, 2),
    "turns": ("turns of a gateway's event loop with 1,000 streams", turns.measure, 3),
    "dialects": ("gateway CPU per streamed token, by dialect, against plain chat", dialects.measure, 3),
    "large_request": ("a request with 100 tools and 200 messages", large_request.measure, 100),
    "ttft_added": ("time to first token added by the gateway", ttft_added.measure, 200),
    "against_llama_server": ("end to end against llama-server, one thread each", against_llama_server.measure, 2),
    "admission": ("what admission costs per call", admission.measure, 5),
    "limits": ("what limits cost per call", limits.measure, 3),
    "engine": ("the engine against llama-server, by workload", engine.measure, 0),
    "speculation": ("drafted answers, against plain ones and llama-server's drafts", speculation.measure, 3),
    "media": ("pictures beside streams, against llama-server", media.measure, 3),
    "constrained": ("answers in a form: what they cost, and which schemas are kept", constrained.measure, 3),
    "routing_sim": ("placement in simulated time, against the usual ways", routing_sim.measure, 3),
    "placement_cost": ("what placing costs", placement_cost.measure, 2),
    "residency": ("which models are loaded, in simulated time, and what deciding costs", residency.measure, 20),
    "models": ("models that calls load, beside llama-server's router and llama-swap", models.measure, 1_000),
    "scrape_cost": ("what being scraped costs a gateway", scrape_cost.measure, 3),
    "tracing_cost": ("what tracing costs a gateway", tracing_cost.measure, 5),
    "viewers_cost": ("what people who look at the fleet cost a gateway", viewers_cost.measure, 3),
    "usage_cost": ("what the usage of calls costs", usage_cost.measure, 5),
    "tokenising": ("long texts in a process of their own, against this process", tokenising.measure, 21),
    "several_gateways": ("several gateways on one machine", several_gateways.measure, 3),
    "capacity": ("unit costs, and the model of docs/capacity.md against runs of many streams", capacity.measure, 1),
    "ledger": ("pages and sums of the ledger, with ten million calls", ledger.measure, ledger.ROWS),
    "many_streams": ("200 concurrent streams through one gateway", many_streams.measure, 6),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("claims", nargs="*", choices=[*CLAIMS, []], help="which to measure; all of them by default")
    engine.add_arguments(parser)
    arguments = parser.parse_args()
    names = arguments.claims or list(CLAIMS)
    missed = 0
    for name in names:
        title, measure, size = CLAIMS[name]
        if name == "engine":
            measure = partial(engine.measure, wish=engine.wish(arguments))
        if name == "routing_sim":
            measure = partial(routing_sim.measure, quick=arguments.quick)
        if name == "ledger" and arguments.quick:
            size = ledger.QUICK_ROWS
        rows = measure(size)
        print_rows(title, rows)
        missed += sum(not row.reached for row in rows)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
