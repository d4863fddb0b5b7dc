"""Write the `.env` of docker-compose.yml, its secrets made on this machine: `python3 deploy/compose/new_env.py [FILE]`.

In a file that an earlier version wrote it adds what that did not know. Standard library only. What is not a secret
stands there as a comment, with its default. The program writes the file itself, for its owner's eyes only: a shell's
`>` would make it as readable as everything else.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

DEFAULT = Path(__file__).resolve().parents[2] / ".env"

SECRETS = {
    "PADDOCK_API_KEY": "the first API key, an admin's; callers send it as `Authorization: Bearer`",
    "PADDOCK_WORKER_SECRET": "what gateways and workers know each other by",
    "PADDOCK_GATEWAY_SECRET": "of gateways and the accounts service: seals the records of keys, and drains gateways",
    "PADDOCK_CACHE_SECRET": "what workers seal cached prompts with, where you give them a cache_dir",
    "PADDOCK_METRICS_KEY": "what /metrics of the gateway asks for; Prometheus sends it",
    "REDIS_PASSWORD": "of the Redis in its container, for you: may do everything there",
    "REDIS_GATEWAY_PASSWORD": "of the user that gateways log in to Redis as",
    "REDIS_WORKER_PASSWORD": "of the user that workers log in to Redis as, who reaches their own records only",
    "REDIS_SUPERVISOR_PASSWORD": "of the user that the supervisor of a catalog's models logs in to Redis as",
    "POSTGRES_PASSWORD": "of the user that the accounts service logs in to PostgreSQL as",
    "GRAFANA_PASSWORD": "of Grafana's user `admin`",
}
CHOICES = {
    "PADDOCK_HF": ("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", "model of the Hugging Face hub; unset: the demo model"),
    "PADDOCK_ALIAS": ("qwen", "the name that callers use; goes with the model"),
    "HF_TOKEN": ("", "where the model is gated"),
    "PADDOCK_SLOTS": ("8", "conversations at once, per worker"),
    "PADDOCK_CTX": ("0", "longest conversation, tokens; 0: what the model was trained for"),
    "PADDOCK_START_TIMEOUT_S": ("600", "how long a call is held while its model has no worker"),
    "PADDOCK_RESPONSES_BYTES_PER_TEAM": ("16777216", "most bytes of stored responses per team; they lie in Redis"),
    "PADDOCK_DATABASE_URL": ("", "a PostgreSQL of your own: postgresql://USER:PASSWORD@HOST/NAME"),
    "COMPOSE_PROFILES": ("gpu", "on GPUs; catalog, catalog-gpu: several models. With WORKERS=0; `down` reads it"),
    "CATALOG_FOLDER": ("./deploy/compose/catalog", "folder with a catalog.yaml; goes with COMPOSE_PROFILES=catalog"),
    "MODELS_MEMORY": ("16g", "most memory of all workers of a catalog's models together"),
    "WORKERS": ("2", "workers on processors; 0 with COMPOSE_PROFILES=gpu, catalog or catalog-gpu"),
    "WORKER_MEMORY": ("8g", "most memory of a worker: the model, its KV cache and cache_ram_mib"),
    "GPUS": ("1", "GPUs of the profiles `gpu` and `catalog-gpu`"),
    "BIND_ADDRESS": ("127.0.0.1", "where the gateway listens; put TLS in front of it before you open it"),
    "GATEWAY_PORT": ("8080", "of this machine"),
    "PROMETHEUS_PORT": ("9090", "the same"),
    "GRAFANA_PORT": ("3000", "the same"),
    "PROMETHEUS_RETENTION": ("15d", "how long series are kept"),
    "PADDOCK_VERSION": ("0.1.0", "tag of the images"),
}
"""Variable -> its default (an example, where there is none) and what it says."""


def document() -> str:
    lines = ["# Read by `docker compose`. Keep it to yourself: it is not tracked."]
    for name, meaning in SECRETS.items():
        prefix = "pk-" if name == "PADDOCK_API_KEY" else ""
        lines += ["", f"# {meaning}", f"{name}={prefix}{secrets.token_hex(24)}"]
    lines += ["", "# --- as you like ---"]
    for name, (value, meaning) in CHOICES.items():
        lines += ["", f"# {meaning}", f"#{name}={value}"]
    return "\n".join(lines) + "\n"


def write_new(path: Path) -> None:
    """Make the file, readable by its owner only. Raises FileExistsError; secrets in use are never replaced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(document())


def add_missing(path: Path) -> list[str]:
    """Append the secrets that an earlier version did not know -> their names. Those that are there stay."""
    text = path.read_text(encoding="utf-8")
    there = {line.partition("=")[0].strip() for line in text.splitlines()}
    missing = [name for name in SECRETS if name not in there]
    if not missing:
        return []
    with path.open("a", encoding="utf-8") as file:
        file.write("" if text.endswith("\n") else "\n")
        file.writelines(f"\n# {SECRETS[name]}\n{name}={secrets.token_hex(24)}\n" for name in missing)
    return missing


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    try:
        if path.exists() and (added := add_missing(path)):
            sys.stdout.write(f"{path} has what it lacked: {', '.join(added)}. The rest is as it was.\n")
            return 0
        write_new(path)
    except FileExistsError:
        sys.stderr.write(f"{path} is there already, and its secrets may be in use. Move it away for new ones.\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{path} can't be written: {error.strerror}.\n")
        return 1
    sys.stdout.write(f"{path} holds new secrets; only you can read it.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
