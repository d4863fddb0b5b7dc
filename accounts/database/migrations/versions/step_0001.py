"""Make all tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the change."""
    _upgrade_aliases()
    _upgrade_audit()
    _upgrade_audit_indexes()
    _upgrade_budget_periods()
    _upgrade_facts()
    _upgrade_organisations()
    _upgrade_prices()
    _upgrade_sessions()
    _upgrade_sessions_indexes()
    _upgrade_usage()
    _upgrade_usage_indexes()
    _upgrade_usage_days()
    _upgrade_usage_end_users()
    _upgrade_usage_hours()
    _upgrade_usage_months()
    _upgrade_users()
    _upgrade_users_indexes()
    _upgrade_webhooks()
    _upgrade_webhooks_indexes()
    _upgrade_teams()
    _upgrade_teams_indexes()
    _upgrade_api_keys()
    _upgrade_api_keys_indexes()
    _upgrade_memberships()
    _upgrade_memberships_indexes()


def _upgrade_aliases() -> None:
    op.create_table(
        "aliases",
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_aliases")),
    )


def _upgrade_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("actor", sa.String(length=256), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.Column("previous_hash", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit")),
    )


def _upgrade_audit_indexes() -> None:
    op.create_index(op.f("ix_audit_actor"), "audit", ["actor"], unique=False)
    op.create_index(op.f("ix_audit_at"), "audit", ["at"], unique=False)
    op.create_index(op.f("ix_audit_kind_subject"), "audit", ["kind", "subject"], unique=False)
    op.create_index(op.f("ix_audit_team"), "audit", ["team"], unique=False)


def _upgrade_budget_periods() -> None:
    op.create_table(
        "budget_periods",
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("period", sa.String(length=8), nullable=False),
        sa.Column("time_zone", sa.String(length=64), nullable=False),
        sa.Column("begins_at", sa.BigInteger(), nullable=False),
        sa.Column("ends_at", sa.BigInteger(), nullable=False),
        sa.Column("spent_nano", sa.BigInteger(), nullable=False),
        sa.Column("warned", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "subject", "period", "time_zone", "begins_at", name=op.f("pk_budget_periods")),
    )


def _upgrade_facts() -> None:
    op.create_table(
        "facts",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_facts")),
    )


def _upgrade_organisations() -> None:
    op.create_table(
        "organisations",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_organisations")),
    )


def _upgrade_prices() -> None:
    op.create_table(
        "prices",
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("valid_from", sa.Float(), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("model", "valid_from", name=op.f("pk_prices")),
    )


def _upgrade_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )


def _upgrade_sessions_indexes() -> None:
    op.create_index(op.f("ix_sessions_expires_at"), "sessions", ["expires_at"], unique=False)


def _upgrade_usage() -> None:
    op.create_table(
        "usage",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("process", sa.String(length=32), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("route", sa.String(length=64), nullable=False),
        sa.Column("outcome", sa.String(length=48), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("organisation", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("user", sa.String(length=256), nullable=False),
        sa.Column("end_user", sa.String(length=256), nullable=False),
        sa.Column("alias", sa.String(length=256), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("adapter", sa.String(length=256), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("media_tokens", sa.Integer(), nullable=False),
        sa.Column("queue_ms", sa.Integer(), nullable=False),
        sa.Column("compute_ms", sa.Integer(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.Column("trace_id", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
        sa.UniqueConstraint("process", "number", name=op.f("uq_usage_process_number")),
    )


def _upgrade_usage_indexes() -> None:
    op.create_index(op.f("ix_usage_alias_ended_at_id"), "usage", ["alias", "ended_at", "id"], unique=False)
    op.create_index(
        op.f("ix_usage_end_user_ended_at_id"),
        "usage",
        ["end_user", "ended_at", "id"],
        unique=False,
        sqlite_where=sa.text("\"end_user\" != ''"),
        postgresql_where=sa.text("\"end_user\" != ''"),
    )
    op.create_index(op.f("ix_usage_ended_at_id"), "usage", ["ended_at", "id"], unique=False)
    op.create_index(op.f("ix_usage_key_ended_at_id"), "usage", ["key", "ended_at", "id"], unique=False)
    op.create_index(op.f("ix_usage_model_ended_at_id"), "usage", ["model", "ended_at", "id"], unique=False)
    op.create_index(
        op.f("ix_usage_outcome_ended_at_id"),
        "usage",
        ["outcome", "ended_at", "id"],
        unique=False,
        sqlite_where=sa.text("\"outcome\" != 'ok'"),
        postgresql_where=sa.text("\"outcome\" != 'ok'"),
    )
    op.create_index(op.f("ix_usage_request_id_ended_at_id"), "usage", ["request_id", "ended_at", "id"], unique=False)
    op.create_index(op.f("ix_usage_team_ended_at_id"), "usage", ["team", "ended_at", "id"], unique=False)
    op.create_index(
        op.f("ix_usage_user_ended_at_id"),
        "usage",
        ["user", "ended_at", "id"],
        unique=False,
        sqlite_where=sa.text("\"user\" != ''"),
        postgresql_where=sa.text("\"user\" != ''"),
    )


def _upgrade_usage_days() -> None:
    op.create_table(
        "usage_days",
        sa.Column("day", sa.BigInteger(), nullable=False),
        sa.Column("organisation", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("num_calls", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_ms", sa.BigInteger(), nullable=False),
        sa.Column("compute_ms", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "organisation", "team", "model", name=op.f("pk_usage_days")),
        sqlite_with_rowid=False,
    )


def _upgrade_usage_end_users() -> None:
    op.create_table(
        "usage_end_users",
        sa.Column("day", sa.BigInteger(), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("end_user", sa.String(length=256), nullable=False),
        sa.Column("num_calls", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_ms", sa.BigInteger(), nullable=False),
        sa.Column("compute_ms", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "team", "end_user", name=op.f("pk_usage_end_users")),
        sqlite_with_rowid=False,
    )


def _upgrade_usage_hours() -> None:
    op.create_table(
        "usage_hours",
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("organisation", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("user", sa.String(length=256), nullable=False),
        sa.Column("alias", sa.String(length=256), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("adapter", sa.String(length=256), nullable=False),
        sa.Column("num_calls", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_ms", sa.BigInteger(), nullable=False),
        sa.Column("compute_ms", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "hour", "organisation", "team", "key", "user", "alias", "model", "adapter", name=op.f("pk_usage_hours")
        ),
        sqlite_with_rowid=False,
    )


def _upgrade_usage_months() -> None:
    op.create_table(
        "usage_months",
        sa.Column("month", sa.BigInteger(), nullable=False),
        sa.Column("organisation", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("num_calls", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("media_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_ms", sa.BigInteger(), nullable=False),
        sa.Column("compute_ms", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("month", "team", "model", "organisation", name=op.f("pk_usage_months")),
        sqlite_with_rowid=False,
    )


def _upgrade_users() -> None:
    op.create_table(
        "users",
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("email", sa.String(length=320), nullable=False),
        sa.Column("last_login_at", sa.Float(), nullable=True),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_users")),
    )


def _upgrade_users_indexes() -> None:
    op.create_index(op.f("ix_users_email"), "users", ["email"], unique=False)


def _upgrade_webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("next_at", sa.Float(), nullable=False),
        sa.Column("num_tries", sa.Integer(), nullable=False),
        sa.Column("is_done", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
    )


def _upgrade_webhooks_indexes() -> None:
    op.create_index(op.f("ix_webhooks_next_at"), "webhooks", ["next_at"], unique=False)


def _upgrade_teams() -> None:
    op.create_table(
        "teams",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("organisation", sa.String(length=64), nullable=False),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["organisation"], ["organisations.name"], name=op.f("fk_teams_organisation")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_teams")),
    )


def _upgrade_teams_indexes() -> None:
    op.create_index(op.f("ix_teams_organisation"), "teams", ["organisation"], unique=False)


def _upgrade_api_keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("user", sa.String(length=256), nullable=False),
        sa.Column("created_by", sa.String(length=256), nullable=False),
        sa.Column("request", sa.String(length=160), nullable=False),
        sa.Column("last_used_at", sa.Float(), nullable=True),
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["team"], ["teams.name"], name=op.f("fk_api_keys_team")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
    )


def _upgrade_api_keys_indexes() -> None:
    op.create_index(op.f("ix_api_keys_team"), "api_keys", ["team"], unique=False)
    op.create_index(op.f("ix_api_keys_user"), "api_keys", ["user"], unique=False)


def _upgrade_memberships() -> None:
    op.create_table(
        "memberships",
        sa.Column("team", sa.String(length=64), nullable=False),
        sa.Column("user", sa.String(length=256), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(["team"], ["teams.name"], name=op.f("fk_memberships_team"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_memberships_user"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("team", "user", name=op.f("pk_memberships")),
    )


def _upgrade_memberships_indexes() -> None:
    op.create_index(op.f("ix_memberships_user"), "memberships", ["user"], unique=False)
