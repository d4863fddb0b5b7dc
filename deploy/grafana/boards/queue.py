"""Who waits, how long, whether the prediction was right, and whether teams get their shares."""

from __future__ import annotations

from boards.board import Board
from boards.panel import Panel, Query, Row, Shape, Step, figure
from boards.promql import OF_MODEL, all_see, each_has, or_zero, quantile, rate, ratio, where_any

NOW = Row(
    "Now",
    (
        figure(
            "Calls that wait",
            "Over all gateways and chosen models.",
            f"sum({each_has('paddock_queue_length')})",
            steps=(Step(10, "orange"), Step(100, "red")),
            width=4,
        ),
        figure(
            "The oldest has waited",
            "Of all calls that wait now.",
            f"max({all_see('paddock_queue_oldest_seconds')})",
            unit="s",
            steps=(Step(30, "orange"), Step(60, "red")),
            width=4,
        ),
        figure(
            "A new call would wait",
            "The longest prediction of the chosen models; 0 while nobody waits.",
            f"max({all_see('paddock_predicted_wait_seconds')})",
            unit="s",
            steps=(Step(10, "orange"), Step(30, "red")),
            width=4,
        ),
        figure(
            "Waited, p95",
            "19 of 20 calls that got a slot had it sooner than this.",
            quantile(0.95, "paddock_queue_wait_seconds"),
            unit="s",
            steps=(Step(5, "orange"), Step(30, "red")),
            width=4,
        ),
        figure(
            "In flight",
            "Calls between their permission and their end, waiting ones included.",
            f"sum({each_has('paddock_requests_in_flight')})",
            width=4,
        ),
        figure(
            "Turned away, 5 min",
            "Calls that were told that the line is full, or waited for longer than `queue_timeout_s`.",
            or_zero(f'sum(increase(paddock_failures_total{{code=~"queue_full|queue_timeout", {OF_MODEL}}}[5m]))'),
            steps=(Step(1, "orange"),),
            width=4,
        ),
    ),
)

LINE = Row(
    "The line",
    (
        Panel(
            "Calls that wait",
            "By model, over all gateways, also for a model without a worker. Models scale on this.",
            (Query(each_has("paddock_queue_length"), "{{model}}"),),
            stacked=True,
        ),
        Panel(
            "Age of the oldest",
            "How long the call that came first has waited. `queue_timeout_s` ends it with a 503.",
            (Query(all_see("paddock_queue_oldest_seconds"), "{{model}}"),),
            "s",
            steps=(Step(30, "orange"),),
        ),
        Panel(
            "Predicted wait",
            "Of a call that came now, behind those that wait; 0 while nobody does. Callers are told it in "
            "`retry-after` and while they wait.",
            (Query(all_see("paddock_predicted_wait_seconds"), "{{model}}"),),
            "s",
        ),
        Panel(
            "Waits, as a picture",
            "How many calls had their slot after how long. The lowest band did not wait.",
            (
                Query(
                    f"sum by (le) (increase(paddock_queue_wait_seconds_bucket{{{OF_MODEL}}}[$__rate_interval]))",
                    "{{le}}",
                ),
            ),
            "s",
            Shape.HEAT,
        ),
        Panel(
            "Wait for a slot",
            "Of calls that got one, all their attempts together.",
            tuple(
                Query(quantile(share, "paddock_queue_wait_seconds", by="model"), f"{{{{model}}}} p{share * 100:.0f}")
                for share in (0.5, 0.95)
            ),
            "s",
        ),
        Panel(
            "How far predictions were off",
            "Of calls that had to wait: the difference between what they were told at first and what it was.",
            (
                Query(
                    or_zero(
                        f"histogram_quantile(0.5, sum by (le, model) "
                        f"(rate(paddock_wait_error_seconds_bucket{{{OF_MODEL}}}[$__rate_interval]))) >= 0",
                        "model",
                        "nobody waited",
                    ),
                    "{{model}} p50",
                ),
                Query(
                    or_zero(
                        f"histogram_quantile(0.95, sum by (le, model) "
                        f"(rate(paddock_wait_error_seconds_bucket{{{OF_MODEL}}}[$__rate_interval]))) >= 0",
                        "model",
                        "nobody waited",
                    ),
                    "{{model}} p95",
                ),
            ),
            "s",
        ),
    ),
)

FAIR = Row(
    "Fairness",
    (
        Panel(
            "Mean wait by team",
            "The waits of a team's calls by their number. A team beyond its share waits longer; others should not.",
            (
                Query(
                    ratio(
                        rate("paddock_team_queue_seconds_total", by="team"), rate("paddock_requests_total", by="team")
                    ),
                    "{{team}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Share of the tokens by team",
            "Generated tokens and prompt tokens that were computed. While all of them want more than they get, shares "
            "are as the weights of their keys.",
            (
                Query(
                    f"({rate('paddock_generated_tokens_total', by='team')} + "
                    f"{rate('paddock_prompt_tokens_total', by='team')} - "
                    f"{rate('paddock_cached_tokens_total', by='team')}) / on () group_left () "
                    f"(({rate('paddock_generated_tokens_total')} + {rate('paddock_prompt_tokens_total')} - "
                    f"{rate('paddock_cached_tokens_total')}) > 0)",
                    "{{team}}",
                ),
            ),
            "percentunit",
            maximum=1,
            stacked=True,
        ),
        Panel(
            "Overtaken",
            "Times per second that a slot went past a call that wanted it, to one that loses more by waiting. No call "
            "is overtaken more than 8 times.",
            (Query(or_zero(rate("paddock_overtaken_total", by="model"), "model"), "{{model}}"),),
            "ops",
        ),
    ),
)

BOUNDS = Row(
    "Bounds and leases",
    (
        Panel(
            "Turned away",
            "Calls per second that a bound of the operator's ended: full line (429), too long a wait (503) or a call.",
            (
                Query(
                    where_any(rate("paddock_failures_total", f'who="policy", {OF_MODEL}', by="model, code"), "code"),
                    "{{model}} {{code}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Leases and busy slots",
            "Slots that gateways hold for calls, and slots that workers say are busy. Long apart: one of them leaks.",
            (
                Query(each_has("paddock_leases"), "{{model}}: leases"),
                Query(all_see("paddock_slots_busy"), "{{model}}: busy"),
            ),
        ),
        Panel(
            "Leases lost",
            "In five minutes: `void` with their worker, `crowded` after Redis lost them, `expired` with their gateway.",
            (
                Query(
                    where_any(f"sum by (model, why) (increase(paddock_leases_lost_total{{{OF_MODEL}}}[5m]))", "why"),
                    "{{model}} {{why}}",
                ),
            ),
        ),
    ),
)

BOARD = Board(
    "queue",
    "Paddock: queue and fairness",
    "Who waits, how long, whether the prediction was right, whether teams get their shares.",
    (NOW, LINE, FAIR, BOUNDS),
)
