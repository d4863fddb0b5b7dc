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
    """What gateways and the accounts service share."""

    gateway_secret: Annotated[
        str,
        Field(
            description="secret that all gateways and the accounts service share and workers do not have: proves who "
            "wrote a key's record in Redis, and who may drain a gateway; empty: one is made in the state folder, which "
            "processes on other machines do not know"
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
