"""One model at a time: how fast it answers, what its calls become, where they are placed."""

from __future__ import annotations

from boards.board import Board
from boards.panel import Panel, Query, Row, Shape, Step
from boards.promql import OF_MODEL, OF_WORKER, all_see, mean, or_zero, quantile, rate, ratio, where_any

CAME_TO_ONE = f'model!="", {OF_MODEL}'
SHARES = (0.5, 0.95, 0.99)


def _quantiles(histogram: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, histogram, by="model"), f"{{{{model}}}} p{share * 100:.0f}") for share in SHARES)


SPEED = Row(
    "How fast",
    (
        Panel(
            "Time to the first token",
            "From arrival to the first token, the wait for a slot included.",
            _quantiles("paddock_ttft_seconds"),
            "s",
            steps=(Step(5, "orange"),),
        ),
        Panel(
            "Time per token",
            "From the first token to the end, by the tokens after the first.",
            _quantiles("paddock_time_per_output_token_seconds"),
            "s",
        ),
        Panel("Whole call", "From arrival to the end, however it ended.", _quantiles("paddock_e2e_seconds"), "s"),
        Panel(
            "First tokens, as a picture",
            "How many calls had their first token after how long. Two bands often are cached and uncached prompts.",
            (Query(f"sum by (le) (increase(paddock_ttft_seconds_bucket{{{OF_MODEL}}}[$__rate_interval]))", "{{le}}"),),
            "s",
            Shape.HEAT,
            width=12,
        ),
        Panel(
            "By operation",
            "Mean time of requests that succeeded, by OpenTelemetry's names: chat, text_completion, embeddings.",
            (
                Query(
                    mean(
                        "gen_ai_server_request_duration_seconds",
                        'gen_ai_response_model=~"$model", error_type=""',
                        by="gen_ai_response_model, gen_ai_operation_name",
                    ),
                    "{{gen_ai_response_model}} {{gen_ai_operation_name}}",
                ),
            ),
            "s",
            width=12,
        ),
    ),
)

CALLS = Row(
    "Calls and tokens",
    (
        Panel(
            "Calls",
            "Requests that ended, per second.",
            (Query(rate("paddock_requests_total", CAME_TO_ONE, by="model"), "{{model}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Failures",
            "Requests per second that did not end well, by who is to blame and the error's code.",
            (
                Query(
                    where_any(rate("paddock_failures_total", by="model, who, code"), "code"),
                    "{{model}} {{who}}: {{code}}",
                ),
            ),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Calls by alias",
            "By the name that callers used, which may be the model's own.",
            (Query(rate("paddock_requests_total", CAME_TO_ONE, by="alias"), "{{alias}}"),),
            "reqps",
            stacked=True,
        ),
        Panel(
            "Generated tokens",
            "Per second, of requests that ended.",
            (Query(rate("paddock_generated_tokens_total", by="model"), "{{model}}"),),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Prompt tokens",
            "Per second, of requests that ended, cached ones included.",
            (Query(rate("paddock_prompt_tokens_total", by="model"), "{{model}}"),),
            "suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Share of prompts that was cached",
            "Tokens that need not be computed again. When it falls, first tokens come later.",
            (
                Query(
                    ratio(
                        rate("paddock_cached_tokens_total", by="model"), rate("paddock_prompt_tokens_total", by="model")
                    ),
                    "{{model}}",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
    ),
)

PLACES = Row(
    "Placing and trying again",
    (
        Panel(
            "Placed where it is cached",
            "Share of calls that went to a worker which was expected to have some of the prompt.",
            (
                Query(
                    ratio(
                        rate("paddock_placements_total", f'how="cached", {OF_MODEL}', by="model"),
                        rate("paddock_placements_total", by="model"),
                    ),
                    "{{model}}",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Asked of workers",
            "Submissions per second: `started`, or why the worker did not take the call.",
            (Query(rate("paddock_attempts_total", by="model, outcome"), "{{model}}: {{outcome}}"),),
            "reqps",
        ),
        Panel(
            "Tried again, sent elsewhere",
            "Calls that another worker got (`granted`), that were not tried again because too many are (`denied`), and "
            "calls that went on to a model of their chain.",
            (
                Query(
                    or_zero(rate("paddock_retries_total", by="model, outcome"), "outcome", "tried again"),
                    "{{model}}: {{outcome}}",
                ),
                Query(
                    or_zero(
                        rate("paddock_fallbacks_total", by="model, fallback, reason"), "fallback", "no other model"
                    ),
                    "{{model}} to {{fallback}}: {{reason}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Slots in use",
            "Share of the slots that calls hold.",
            (
                Query(
                    f"{all_see('paddock_slots_busy')} / ({all_see('paddock_slots')} > 0)",
                    "{{model}}",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Tokens of a prompt",
            "Of calls that workers finished: the median, and the one that 19 of 20 stay below.",
            tuple(
                Query(
                    quantile(share, "vllm:request_prompt_tokens", OF_WORKER, by="model_name"),
                    f"{{{{model_name}}}} p{share * 100:.0f}",
                )
                for share in (0.5, 0.95)
            ),
            "none",
        ),
        Panel(
            "Tokens of an answer",
            "Of calls that workers finished: the median, and the one that 19 of 20 stay below.",
            tuple(
                Query(
                    quantile(share, "vllm:request_generation_tokens", OF_WORKER, by="model_name"),
                    f"{{{{model_name}}}} p{share * 100:.0f}",
                )
                for share in (0.5, 0.95)
            ),
            "none",
        ),
    ),
)

BOARD = Board(
    "models",
    "Paddock: models",
    "One model at a time: how fast it answers, what its calls become, where they are placed.",
    (SPEED, CALLS, PLACES),
)
