"""Is all well? What callers notice, what is waiting, how full the fleet is, and the gateways themselves."""

from __future__ import annotations

from boards.board import Board
from boards.panel import Panel, Query, Row, Step, figure
from boards.promql import OF_MODEL, all_see, came_and_went, each_has, or_zero, quantile, rate

ORANGE_FROM_ONE = (Step(1, "orange"),)
BURN = (Step(1, "orange"), Step(14.4, "red"))

NOW = Row(
    "Now",
    (
        figure(
            "Alerts that fire",
            "Paddock's alerts that fire, of either severity. What each means and what to do is on the Runbook board.",
            or_zero('count(ALERTS{alertname=~"Paddock.+", alertstate="firing"})'),
            steps=(Step(1, "red"),),
        ),
        figure(
            "Gateways",
            "Gateway processes that Prometheus reaches.",
            or_zero("count(paddock_build_info)"),
        ),
        figure(
            "Workers",
            "Live workers of all chosen models, draining ones included.",
            f"sum({all_see('paddock_workers')})",
        ),
        figure(
            "Slots in use",
            "Share of the fleet's slots that calls hold. All day at 100 % means that calls wait: add workers.",
            f"sum({all_see('paddock_slots_busy')}) / (sum({all_see('paddock_slots')}) > 0)",
            unit="percentunit",
            steps=(Step(0.9, "orange"),),
        ),
        figure(
            "Calls that wait",
            "Calls that have no slot yet, those for models without a worker included.",
            f"sum({each_has('paddock_queue_length')})",
            steps=(Step(10, "orange"), Step(100, "red")),
        ),
        figure(
            "Calls per second",
            "Requests that ended, of all outcomes.",
            rate("paddock_requests_total"),
            unit="reqps",
        ),
        figure(
            "First token, p95",
            "19 of 20 calls have their first token sooner than this. It includes the wait for a slot.",
            quantile(0.95, "paddock_ttft_seconds"),
            unit="s",
            steps=(Step(5, "orange"), Step(20, "red")),
        ),
        figure(
            "Failed, 1 h",
            "Share of requests of the last hour that failed by a worker's or the gateway's fault. What callers and "
            "operators' own bounds caused is not counted.",
            "max(paddock:failures:ratio_rate1h{" + OF_MODEL + "})",
            unit="percentunit",
            steps=(Step(0.01, "orange"), Step(0.05, "red")),
        ),
    ),
)

CALLERS = Row(
    "What callers notice",
    (
        Panel(
            "Calls by outcome",
            "Requests that ended, per second. `ok` is an answer; `client_gone` a caller that left; all else an error's "
            "code, as docs/api.md has it.",
            (Query(rate("paddock_requests_total", by="outcome"), "{{outcome}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Time to the first token",
            "From arrival at the gateway to the first token, over all chosen models. The objective is 95 % within 5 s.",
            tuple(Query(quantile(share, "paddock_ttft_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99)),
            "s",
        ),
        Panel(
            "Time per token",
            "From the first token to the end, by the tokens after the first: how fast answers grow for their readers.",
            tuple(
                Query(quantile(share, "paddock_time_per_output_token_seconds"), f"p{share * 100:.0f}")
                for share in (0.5, 0.95, 0.99)
            ),
            "s",
        ),
        Panel(
            "Failures by who is to blame",
            "Requests per second that did not end well: by the caller, by a bound that an operator set (policy), by a "
            "worker, by the gateway. Only the last two count against the objective.",
            (Query(or_zero(rate("paddock_failures_total", by="who"), "who"), "{{who}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Error budget: how fast it is spent",
            "1 means that the budget (1 % of calls fail, 5 % have a late first token) lasts for just 30 days; at 14.4 "
            "it is gone in two days and somebody is woken.",
            (
                Query(
                    "max(paddock:failures:ratio_rate1h{"
                    + OF_MODEL
                    + "}) / (1 - scalar(paddock:objective:success_ratio))",
                    "errors, 1 h",
                ),
                Query(
                    "max(paddock:late:ratio_rate1h{" + OF_MODEL + "}) / (1 - scalar(paddock:objective:ttft_ratio))",
                    "late first tokens, 1 h",
                ),
            ),
            steps=BURN,
        ),
        Panel(
            "Tokens per second",
            "Of requests that ended: prompt tokens, those of them that a cache had, and generated tokens.",
            (
                Query(rate("paddock_prompt_tokens_total"), "prompt"),
                Query(rate("paddock_cached_tokens_total"), "of them cached"),
                Query(rate("paddock_generated_tokens_total"), "generated"),
            ),
            "suffix: tok/s",
        ),
        Panel(
            "Wishes that were passed over",
            "Requests per second with a parameter that nothing was done with, by parameter, and those for a name that "
            "nobody has which went to the catalog's default, by model. A parameter that comes up after a client's "
            "update, or a name after a model's removal, is worth a look.",
            (
                Query(
                    or_zero(rate("paddock_parameters_ignored_total", "", by="parameter"), "parameter"), "{{parameter}}"
                ),
                Query(
                    or_zero(rate("paddock_unknown_models_total", by="model"), "model"),
                    "unknown name, answered by {{model}}",
                ),
            ),
            "reqps",
        ),
    ),
)

FLEET = Row(
    "Fleet and line",
    (
        Panel(
            "Slots",
            "Slots of workers that take calls, and those that calls hold. Where the two touch, calls wait.",
            (
                Query(all_see("paddock_slots"), "{{model}}: slots"),
                Query(all_see("paddock_slots_busy"), "{{model}}: in use"),
            ),
        ),
        Panel(
            "Calls that wait",
            "By model, over all gateways. Models scale on this number.",
            (Query(each_has("paddock_queue_length"), "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Predicted wait",
            "How long a call that came now would wait for a slot, 0 while nobody waits; of a model without a worker, "
            "what the oldest has waited.",
            (Query(all_see("paddock_predicted_wait_seconds"), "{{model}}"),),
            "s",
        ),
        Panel(
            "Workers",
            "Live workers by model. A step down without a deployment is a crash: see the board of workers.",
            (
                Query(all_see("paddock_workers"), "{{model}}"),
                Query(all_see("paddock_workers_draining"), "{{model}}: draining"),
                Query(all_see("paddock_workers_wanted"), "{{model}}: wanted"),
            ),
        ),
        Panel(
            "Worker processes that came and went",
            "In the last five minutes. `lost` did not drain before it went.",
            tuple(Query(expr, legend) for legend, expr in came_and_went().items()),
        ),
        Panel(
            "Circuits open",
            "Workers that failed call after call and are left alone for a while.",
            (Query(all_see("paddock_circuits"), "{{model}}"),),
            steps=ORANGE_FROM_ONE,
        ),
    ),
)

GATEWAYS = Row(
    "Gateways",
    (
        Panel(
            "The gateway's own time",
            "What it takes from arrival to asking the worker, without the wait for a slot: reading, access, placing.",
            tuple(
                Query(quantile(share, "paddock_overhead_seconds"), f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99)
            ),
            "s",
        ),
        Panel(
            "Event loop, p99 late",
            "How late timers fire: every stream of that gateway waits so long. Above 50 ms add gateways.",
            (Query(quantile(0.99, "paddock_loop_lag_seconds", "", by="instance"), "{{instance}}"),),
            "s",
            steps=(Step(0.05, "orange"),),
        ),
        Panel(
            "Connections",
            "That are open, WebSockets among them, and those per second that came beyond a bound, by reason.",
            (
                Query("paddock_connections", "{{instance}}"),
                Query("paddock_websockets", "{{instance}} WebSockets"),
                Query(rate("paddock_connections_beyond_total", "", by="reason"), "beyond: {{reason}}"),
            ),
        ),
        Panel(
            "Redis",
            "1 while Redis takes a gateway's heartbeat. At 0 calls are placed on each gateway's share of the slots.",
            (Query("paddock_redis_up", "{{instance}}"),),
            maximum=1,
            decimals=0,
        ),
        Panel(
            "CPU",
            "Cores that each gateway uses; one process uses one at most.",
            (
                Query(
                    "rate(process_cpu_seconds_total[$__rate_interval]) and on (instance) paddock_build_info",
                    "{{instance}}",
                ),
            ),
            "none",
        ),
        Panel(
            "Memory",
            "Resident memory of each gateway. It should be flat after a warm-up.",
            (Query("process_resident_memory_bytes and on (instance) paddock_build_info", "{{instance}}"),),
            "bytes",
        ),
        Panel(
            "Versions",
            "Gateways by version. More than one line for longer than a rollout means that it stopped half way.",
            (Query("count by (version) (paddock_build_info)", "{{version}}"),),
            decimals=0,
        ),
    ),
)

BOARD = Board(
    "overview",
    "Paddock: overview",
    "Is all well? What callers notice, what waits, how full the fleet is.",
    (NOW, CALLERS, FLEET, GATEWAYS),
)
