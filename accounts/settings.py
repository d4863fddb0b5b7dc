"""Declares the settings of the accounts service, and the secret that it shares with gateways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from workers.settings import PaddockSettings

SOCKET_NAME = "accounts.sock"


def socket_path(state_dir: Path) -> Path:
    """Return the path of the Unix socket on which the service listens unless it is told another place."""
    return state_dir.expanduser() / "run" / SOCKET_NAME


class GatewaySecret(PaddockSettings):
    """Settings that gateways and the accounts service share."""

    gateway_secret: Annotated[
        str,
        Field(
            description="secret that all gateways and the accounts service share and workers do not have: proves who "
            "wrote a key's record in Redis, and who may drain a gateway; empty: one is made in the state folder, which "
            "processes on other machines do not know"
        ),
    ] = ""
    oidc: Annotated[
        str,
        Field(
            description="identity providers of single sign-on, and rules that give people teams and roles: a JSON "
            "object, or the path of a YAML or JSON file (docs/teams.md); empty: none"
        ),
    ] = ""


class AccountsSettings(GatewaySecret):
    """The accounts service: teams, keys, budgets and usage, in a database."""

    database_url: Annotated[
        str,
        Field(
            description="database of the accounts service: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`; "
            "empty: the file `accounts.sqlite` in the state folder"
        ),
    ] = ""
    accounts_listen: Annotated[
        str,
        Field(
            description="where the accounts service listens for gateways: `HOST:PORT`, or the path of a Unix socket; "
            "empty: `run/accounts.sock` in the state folder"
        ),
    ] = ""
    usage_keep_days: Annotated[
        int, Field(ge=1, le=36_500, description="days for which each call's usage is kept in the database")
    ] = 400
    usage_sums_keep_days: Annotated[
        int,
        Field(
            ge=32,
            le=36_500,
            description="days for which sums of usage per hour, and those of end users, are kept; sums per day and "
            "month stay for ever",
        ),
    ] = 800
    webhook_url: Annotated[
        str,
        Field(description="where the accounts service sends events to, such as budgets nearly spent; empty: nowhere"),
    ] = ""
    webhook_secret: Annotated[
        str,
        Field(
            description="secret by which these events are signed (HMAC-SHA256, docs/teams.md#webhooks): any text, or "
            "`whsec_` and base64"
        ),
    ] = ""
