"""Whether Redis answers, how fast its scripts are, what was lost with it."""

from __future__ import annotations

from boards.board import Board
from boards.panel import Panel, Query, Row, Step, figure
from boards.promql import OF_MODEL, all_see, each_has, quantile, rate, where_any

ANY = ""

NOW = Row(
    "Now",
    (
        figure(
            "Gateways without Redis",
            "Gateways whose last heartbeat Redis did not take.",
            "count(paddock_redis_up) - sum(paddock_redis_up)",
            steps=(Step(1, "red"),),
            width=6,
        ),
        figure(
            "Models placed without Redis",
            "On a Cluster one model can be without its server while others are not.",
            f"sum({all_see('paddock_without_redis')})",
            steps=(Step(1, "orange"),),
            width=6,
        ),
        figure(
            "Scripts, p99",
            "From asking for a script to its answer, waiting for those asked for before included.",
            quantile(0.99, "paddock_redis_seconds", ANY),
            unit="s",
            steps=(Step(0.01, "orange"), Step(0.05, "red")),
            width=6,
        ),
        figure(
            "Scripts per second",
            "Of all gateways. One Redis core runs some tens of thousands.",
            rate("paddock_redis_seconds_count", ANY),
            unit="ops",
            width=6,
        ),
    ),
)

SCRIPTS = Row(
    "Scripts",
    (
        Panel(
            "Time by script, p99",
            "What each script does is in docs/placement.md. `acquire` and `claim` are on the way to the first token.",
            (Query(quantile(0.99, "paddock_redis_seconds", ANY, by="script"), "{{script}}"),),
            "s",
            steps=(Step(0.05, "orange"),),
        ),
        Panel(
            "Time by script, p50",
            "Where the median is high too, Redis is busy or far away; where only p99 is, something blocks it at times.",
            (Query(quantile(0.5, "paddock_redis_seconds", ANY, by="script"), "{{script}}"),),
            "s",
        ),
        Panel(
            "Scripts run",
            "Per second, of all gateways.",
            (Query(rate("paddock_redis_seconds_count", ANY, by="script"), "{{script}}"),),
            "ops",
            stacked=True,
        ),
        Panel(
            "Time by gateway, p99",
            "One gateway alone that is slow has a slow event loop or a bad network.",
            (Query(quantile(0.99, "paddock_redis_seconds", ANY, by="instance"), "{{instance}}"),),
            "s",
            steps=(Step(0.05, "orange"),),
            width=12,
        ),
        Panel(
            "Scripts by gateway",
            "Per second. Calls spread over gateways as connections do.",
            (Query(rate("paddock_redis_seconds_count", ANY, by="instance"), "{{instance}}"),),
            "ops",
            stacked=True,
            width=12,
        ),
    ),
)

STATE = Row(
    "What hangs on it",
    (
        Panel(
            "Redis takes heartbeats",
            "1 or 0 for each gateway.",
            (Query("paddock_redis_up", "{{instance}}"),),
            maximum=1,
            decimals=0,
        ),
        Panel(
            "Models placed without Redis",
            "1 while a gateway places a model's calls on its own share of the slots.",
            (Query(all_see("paddock_without_redis"), "{{model}}"),),
            maximum=1,
            decimals=0,
        ),
        Panel(
            "Leases",
            "Slots that gateways hold. After Redis lost its data they are taken anew with their old tokens.",
            (Query(each_has("paddock_leases"), "{{model}}"),),
            stacked=True,
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
            width=12,
        ),
        Panel(
            "Unreadable records",
            "Readings in five minutes that left out what is not as Paddock writes it; the gateway's log names each.",
            (Query("sum by (key) (increase(paddock_redis_unreadable_total[5m]))", "{{key}}"),),
            width=12,
        ),
        Panel(
            "Failures for want of Redis",
            "Requests per second that ended with `store_unavailable` or another fault of the gateway.",
            (
                Query(
                    where_any(rate("paddock_failures_total", f'who="gateway", {OF_MODEL}', by="code"), "code"),
                    "{{code}}",
                ),
            ),
            "reqps",
            width=12,
        ),
    ),
)

BOARD = Board(
    "redis",
    "Paddock: Redis",
    "Whether Redis answers, how fast its scripts are, what was lost with it.",
    (NOW, SCRIPTS, STATE),
)
