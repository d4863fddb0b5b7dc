"""What each team used, and how it fared."""

from __future__ import annotations

from boards.board import MODEL, TEAM, Board
from boards.panel import Panel, Query, Row, Shape, Step
from boards.promql import OF_MODEL, or_zero, rate, ratio

OF_TEAM = f'team=~"$team", {OF_MODEL}'
ANY = ""
NOT_OK = f'outcome!="ok", {OF_TEAM}'


def _used(series: str, labels: str = OF_TEAM) -> str:
    """In the time that the board shows."""
    return f"sum by (team) (increase({series}{{{labels}}}[$__range]))"


SUM = Row(
    "In the time shown",
    (
        Panel(
            "Usage by team",
            "Requests and tokens of each team in the time that the board shows. Tokens are counted by the workers. For "
            "an invoice choose a month; a gateway that was stopped in between loses no more than its last scrape.",
            (
                Query(_used("paddock_requests_total"), "Requests"),
                Query(or_zero(_used("paddock_requests_total", NOT_OK), "team"), "Not answered"),
                Query(_used("paddock_prompt_tokens_total"), "Prompt tokens"),
                Query(_used("paddock_cached_tokens_total"), "Of them cached"),
                Query(_used("paddock_generated_tokens_total"), "Generated tokens"),
                Query(_used("paddock_team_queue_seconds_total"), "Waited"),
            ),
            "short",
            Shape.TABLE,
            width=24,
            units=(("Waited", "s"),),
            decimals=0,
        ),
    ),
)

OVER_TIME = Row(
    "Over time",
    (
        Panel(
            "Calls",
            "Requests that ended, per second.",
            (Query(rate("paddock_requests_total", OF_TEAM, by="team"), "{{team}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Generated tokens",
            "Per second, of requests that ended.",
            (Query(rate("paddock_generated_tokens_total", OF_TEAM, by="team"), "{{team}}"),),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Prompt tokens",
            "Per second, of requests that ended, cached ones included.",
            (Query(rate("paddock_prompt_tokens_total", OF_TEAM, by="team"), "{{team}}"),),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Share of prompts that was cached",
            "Teams share no cached prompts but those that the catalog marks. A team whose share is low often begins "
            "its prompts with something that changes, such as the time.",
            (
                Query(
                    ratio(
                        rate("paddock_cached_tokens_total", OF_TEAM, by="team"),
                        rate("paddock_prompt_tokens_total", OF_TEAM, by="team"),
                    ),
                    "{{team}}",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Mean wait for a slot",
            "The waits of a team's calls by their number.",
            (
                Query(
                    ratio(
                        rate("paddock_team_queue_seconds_total", OF_TEAM, by="team"),
                        rate("paddock_requests_total", OF_TEAM, by="team"),
                    ),
                    "{{team}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Not answered",
            "Share of a team's requests that did not end well, whoever is to blame; callers that left count too.",
            (
                Query(
                    f"({rate('paddock_requests_total', NOT_OK, by='team')} "
                    f"or 0 * {rate('paddock_requests_total', OF_TEAM, by='team')}) / "
                    f"({rate('paddock_requests_total', OF_TEAM, by='team')} > 0)",
                    "{{team}}",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Models by team",
            "Requests per second of each team, by model.",
            (Query(rate("paddock_requests_total", OF_TEAM, by="team, model"), "{{team}}: {{model}}"),),
            "reqps",
            width=12,
        ),
        Panel(
            "Outcomes by team",
            "Requests per second of each team, by outcome.",
            (Query(rate("paddock_requests_total", OF_TEAM, by="team, outcome"), "{{team}}: {{outcome}}"),),
            "reqps",
            width=12,
        ),
    ),
)

LEDGER = Row(
    "Usage, budgets and the accounts service",
    (
        Panel(
            "Usage on its way",
            "Records of calls that the database does not have yet, wherever they wait; and the entries of them in "
            "Redis, of up to 100 records each.",
            (
                Query("sum(paddock_usage_waiting_records)", "Records"),
                Query("max(paddock_usage_stream_entries)", "Entries in Redis"),
                Query("max(paddock_usage_set_aside_entries)", "Entries set aside"),
            ),
        ),
        Panel(
            "Wait for the database",
            "How long usage has waited while the database took none. The second line is what waits in Redis alone: "
            "where it is at 0 and the first is not, records wait on the disks of gateways.",
            (
                Query("max(paddock_usage_waiting_seconds)", "Anywhere"),
                Query("max(paddock_ledger_lag_seconds)", "In Redis"),
            ),
            "s",
            steps=(Step(300, "orange"),),
        ),
        Panel(
            "Room for usage in Redis",
            "Share of `usage_stream_max` that is used. At 100 % records stay on the disks of gateways.",
            (Query("max(paddock_usage_stream_entries) / (max(paddock_usage_stream_max_entries) > 0)", "Used"),),
            "percentunit",
            steps=(Step(0.8, "orange"),),
            maximum=1,
        ),
        Panel(
            "Usage on disk",
            "Of each gateway; at most `usage_journal_mib`, beyond which records are lost.",
            (Query("sum by (instance) (paddock_usage_journal_bytes)", "{{instance}}"),),
            "bytes",
        ),
        Panel(
            "Records",
            "Written to the database, and dropped by gateways that had no room, per second.",
            (
                Query(rate("paddock_ledger_records_total", ANY), "Written"),
                Query(rate("paddock_usage_records_total", 'what="dropped"'), "Dropped"),
            ),
            "ops",
        ),
        Panel(
            "Budgets and events",
            "Budgets that have passed a threshold, or are spent, in the period that runs; events that the webhook has "
            "not taken yet.",
            (
                Query("max(paddock_budgets_over_threshold)", "Over a threshold"),
                Query("max(paddock_budgets_spent)", "Spent"),
                Query("max(paddock_webhooks_pending)", "Events that wait"),
            ),
        ),
    ),
)

BOARD = Board(
    "teams",
    "Paddock: usage by team",
    "What each team used, and how it fared.",
    (SUM, OVER_TIME, LEDGER),
    (MODEL, TEAM),
    span="24h",
)
