"""The first API key: preset, found in the state folder, or made. Several gateways that start at once agree on one."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from pathlib import Path

import redis.asyncio

from gateway.access.records import FIRST_KEY_NAME, AccessRecord, decode_record, encode_record, first_record
from workers.protocol import keys

log = logging.getLogger(__name__)

FILE_NAME = "first-key"
PREFIX = "pk-"
NUM_RANDOM_BYTES = 32


def path_in(state_dir: Path) -> Path:
    return state_dir.expanduser() / FILE_NAME


async def settle(redis: redis.asyncio.Redis, preset: str, state_dir: Path) -> AccessRecord:
    """The record of the first key, written to Redis; a key that is made here is also written to the file.

    A preset key and a key in the file are the operator's word and replace what Redis holds; a key that is made now
    yields to one that is there already. Raises OSError when the folder can't be written.
    """
    if preset:
        return await _announce(redis, first_record(preset))
    path = path_in(state_dir)
    found = _read(path)
    if found:
        return await _announce(redis, first_record(found))
    held = await redis.hget(keys.ACCESS_KEYS, FIRST_KEY_NAME)
    if held is not None:
        return _held_elsewhere(held, path)
    made = PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)
    if not _write_new(path, made):
        # Another gateway with this state folder was faster.
        return await _announce(redis, first_record(_read(path) or made))
    record = first_record(made)
    if await redis.hsetnx(keys.ACCESS_KEYS, FIRST_KEY_NAME, encode_record(record)):
        return record
    held = await redis.hget(keys.ACCESS_KEYS, FIRST_KEY_NAME)
    if held is None or held == encode_record(record):
        return record
    path.unlink(missing_ok=True)
    return _held_elsewhere(held, path)


async def _announce(redis: redis.asyncio.Redis, record: AccessRecord) -> AccessRecord:
    await redis.hset(keys.ACCESS_KEYS, FIRST_KEY_NAME, encode_record(record))
    return record


def _held_elsewhere(held: bytes | str, path: Path) -> AccessRecord:
    log.warning(
        "the first API key was made by another gateway on this Redis, so %s is not written; if that key is lost, "
        "set PADDOCK_API_KEY",
        path,
    )
    return decode_record(held)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _write_new(path: Path, key: str) -> bool:
    """Whole or not at all, readable by its owner only; False when the file is there already."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE_NAME}-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(key + "\n")
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True
