"""The first API key: preset, found in the state folder, or made. Gateways that start at once agree on the same key."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from pathlib import Path

import redis.asyncio
from redis.exceptions import ResponseError

from accounts.protocol import changes
from accounts.protocol.key_format import new_key
from accounts.protocol.records import FIRST_KEY_NAME, AccessRecord, first_record, is_bare, open_record
from gateway.store.outage import is_of_one_name
from workers.protocol import keys
from workers.redis.link import run_command

log = logging.getLogger(__name__)

FILE_NAME = "first-key"


def path_in(state_dir: Path) -> Path:
    return state_dir.expanduser() / FILE_NAME


async def settle(redis: redis.asyncio.Redis, secret: str, preset: str, state_dir: Path) -> AccessRecord:
    """Decide which key is the first key, and return its record. A new key is written to the key file in `state_dir`.

    A key in Redis, which others may be using, is kept; only a `preset` key replaces it, not a key in the file or a new
    one. The record in Redis counts only if it is sealed with the gateway secret; a record without a seal is of an
    earlier version and is replaced. If the Redis key for API keys has another type than hash, this gateway uses its own
    key. Raises OSError if the folder can't be written."""
    try:
        return await _settle(redis, secret, preset, state_dir)
    except ResponseError as error:
        if not is_of_one_name(error):
            raise
        log.error("the API keys in Redis can't be read: %s of another type (%s); delete it", keys.ACCESS_KEYS, error)
    path = path_in(state_dir)
    own = preset or read_file(path)
    if not own:
        own = new_key()
        _write_new(path, own)
    return first_record(own)


async def _settle(redis: redis.asyncio.Redis, secret: str, preset: str, state_dir: Path) -> AccessRecord:
    if preset:
        return await _replace(redis, secret, first_record(preset))
    path = path_in(state_dir)
    found = read_file(path)
    if found:
        return await _offer_found(redis, secret, first_record(found), path)
    if (held := await _read_redis(redis, secret)) is not None:
        return _yield_to(held, path)
    made = new_key()
    if not _write_new(path, made):
        # Another gateway with this state folder was faster.
        return await _offer_found(redis, secret, first_record(read_file(path) or made), path)
    record = first_record(made)
    held = await _offer(redis, secret, record)
    if held.sha256 == record.sha256:
        return record
    path.unlink(missing_ok=True)
    return _yield_to(held, path)


async def _replace(redis: redis.asyncio.Redis, secret: str, record: AccessRecord) -> AccessRecord:
    held = await _read_redis(redis, secret)
    if held is not None and held.sha256 != record.sha256:
        log.warning("the preset API key replaces the first key in Redis, which is valid no more")
    await run_command(redis, changes.command([changes.put(record, secret)]))
    return record


async def _offer_found(redis: redis.asyncio.Redis, secret: str, record: AccessRecord, path: Path) -> AccessRecord:
    held = await _offer(redis, secret, record)
    if held.sha256 != record.sha256:
        log.warning(
            "the API key in %s is not valid: the first key in this Redis is another, and that one stays. Delete the "
            "file if it is left over; to use its key instead, set PADDOCK_API_KEY to it on every gateway",
            path,
        )
    return held


async def _offer(redis: redis.asyncio.Redis, secret: str, record: AccessRecord) -> AccessRecord:
    """Write the first key's record to Redis unless Redis has one, and return the record that is valid then."""
    value = await redis.hget(keys.ACCESS_KEYS, FIRST_KEY_NAME)
    if value is not None and is_bare(value):
        return await _replace(redis, secret, record)
    if await run_command(redis, changes.command([changes.offer(record, secret)])) == [1]:
        return record
    return await _read_redis(redis, secret) or record


async def _read_redis(redis: redis.asyncio.Redis, secret: str) -> AccessRecord | None:
    """Return the first key's record in Redis; None if there is none or it is not valid (`KeyStore` logs why)."""
    value = await redis.hget(keys.ACCESS_KEYS, FIRST_KEY_NAME)
    try:
        return None if value is None else open_record(value, secret)
    except ValueError:
        return None


def _yield_to(held: AccessRecord, path: Path) -> AccessRecord:
    log.warning(
        "the first API key was made by another gateway on this Redis, so %s is not written; if that key is lost, "
        "set PADDOCK_API_KEY",
        path,
    )
    return held


def read_file(path: Path) -> str:
    """Return the key in a file; empty if there is no such file. Raises OSError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "it holds no key, since it is no text", str(path)) from None


def _write_new(path: Path, key: str) -> bool:
    """Write the key file whole or not at all, readable by its owner only. Return False if it exists already."""
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
