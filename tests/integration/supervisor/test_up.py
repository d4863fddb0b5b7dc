"""`paddock up` from a terminal's point of view: what it says, what it starts, what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import redis

from gateway.admission.admission import KNOWN_AFTER_S
from gateway.client import BadRequest, Client, ModelStatus, Unavailable
from gateway.commands.target import address_file
from gateway.commands.up import SOCKET_LOOK_S
from tests.integration.supervisor.conftest import Program, Programs, unreadable, wait_until
from tests.support.hub_server import Hub
from tests.support.process_limits import full_disk
from tests.support.redis_server import RedisServer
from tests.support.small_disk import fill, filled, needs_disks, read_only, small_disk
from workers.protocol import keys
from workers.protocol.exits import Exit

SMALL = ("--slots", "2", "--ctx", "128", "--workers", "1")


def ask(port: int, key: str, model: str) -> str:
    body = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "Once"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        choice = json.load(answer)["choices"][0]
    return str(choice["finish_reason"])


def port_of(program: Program) -> int:
    line = next(line for line in program.text().splitlines() if line.startswith("  address"))
    return int(line.rsplit(":", 1)[1].removesuffix("/v1"))


def assert_nothing_left(program: Program) -> None:
    wait_until(lambda: not program.survivors(), lambda: f"still running: {program.survivors()}")
    left = sorted(path.name for path in (program.state / "run").iterdir())
    assert left == ["catalog.json"]


def test_the_life_of_up(programs: Programs, model: Path) -> None:
    """Start, answer, refuse a second one, survive a killed worker, stop on Ctrl-C: nothing is left."""
    flags = ("--port", "0", "--workers", "2", "--slots", "2", "--model", str(model), "--alias", "tale")
    up = programs.start_anew("up", *flags)
    up.until("Ctrl-C stops everything")
    key = (up.state / "first-key").read_text().strip()
    assert f"API key  {key}" in up.text()
    assert ask(port_of(up), key, "tale") in ("stop", "length")

    for path, mode in ((up.state, 0o700), (up.state / "first-key", 0o600), (up.state / "worker-secret", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
    secrets = [key, (up.state / "worker-secret").read_text().strip()]
    for process in up.family().values():
        assert not [word for word in process.cmdline() for secret in secrets if secret in word]

    second = programs.start("up", "--port", "0", "--model", str(model))
    assert second.wait() == Exit.USAGE
    assert f"is in use by process {up.popen.pid}; stop it, or give another folder with --state-dir" in second.text()

    victim = up.worker_pid("worker-1")
    os.kill(victim, signal.SIGKILL)
    up.until("paddock: worker-1 died (SIGKILL); starting it again in 0.2 s")
    wait_until(lambda: up.worker_pid("worker-1") not in (0, victim), lambda: "a new worker-1")

    assert up.stop(signal.SIGINT) == 0, up.text()
    assert up.text().rstrip().endswith("paddock: stopped")
    assert_nothing_left(up)
    assert (up.state / "logs" / "worker-0.log").stat().st_size > 0


def test_a_model_is_unloaded_and_loaded(programs: Programs, model: Path) -> None:
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    up.until("Ctrl-C stops everything")
    address = f"http://127.0.0.1:{port_of(up)}"
    first = up.worker_pid("worker-0")
    with Client(address, (up.state / "first-key").read_text().strip()) as client:
        with pytest.raises(BadRequest, match="`tale` is loaded already"):
            client.models.load("tale")
        client.models.unload("tale")
        client.models.load("tale")  # a change of mind, before the supervisor has looked
        client.models.unload("tale")
        wait_until(lambda: not up.worker_pid("worker-0"), up.text)
        wait_until(lambda: client.models.retrieve("tale").status == ModelStatus("unloaded"), lambda: "still loaded")
        with pytest.raises(BadRequest, match="`tale` is not loaded"):
            client.models.unload("tale")
        client.models.load("tale")
        coming = [ModelStatus("loading"), ModelStatus("loaded")]
        wait_until(lambda: client.models.retrieve("tale").status in coming, lambda: "still unloaded")
        wait_until(lambda: up.worker_pid("worker-0") not in (0, first), up.text)
        wait_until(lambda: client.models.retrieve("tale").status == ModelStatus("loaded"), lambda: "not loaded")
        assert client.complete("Once upon", n_predict=2, ignore_eos=True).tokens_predicted == 2
    assert "died" not in up.text()
    assert up.stop(signal.SIGINT) == 0, up.text()
    assert_nothing_left(up)


def test_models_are_served_while_the_accounts_database_is_away(programs: Programs, model: Path) -> None:
    away = {"PADDOCK_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL, **away)
    up.until("Ctrl-C stops everything")
    assert "paddock: the accounts service is not ready, its log says why" in up.text()
    assert ask(port_of(up), (up.state / "first-key").read_text().strip(), "tale") in ("stop", "length")
    assert up.stop(signal.SIGINT) == 0, up.text()


def killed(up: Program, *ending: str) -> None:
    """Kill the process whose command line ends so."""
    for process in psutil.Process(up.popen.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[-len(ending) :] == list(ending):
                process.kill()


def removed(folder: Path) -> None:
    """Remove a folder at once, so that nothing is written into it meanwhile."""
    away = folder.with_name("removed")
    folder.rename(away)
    shutil.rmtree(away)


def is_answered(port: int, key: str, model: str) -> bool:
    """Say whether a call is answered; not: it is told to come back later."""
    try:
        return ask(port, key, model) in ("stop", "length")
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


def test_who_removes_its_run_folder_ends_nothing(programs: Programs, model: Path) -> None:
    """A worker that was started again did not find its model, nor the gateway its catalog, and that ended all."""
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    up.until("Ctrl-C stops everything")
    port, key = port_of(up), (up.state / "first-key").read_text().strip()
    removed(up.state / "run")
    killed(up, "workers.cli", "worker")
    killed(up, "gateway.cli", "gateway")
    up.until("worker-0 died (SIGKILL)")
    up.until("gateway died (SIGKILL)")
    wait_until(lambda: is_answered(port, key, "tale"), up.text)
    first = redis_of(up)
    assert first is not None
    first.kill()
    wait_until(lambda: redis_of(up) not in (None, first), up.text)
    for name in ("worker-0.json", "redis.acl"):
        assert stat.S_IMODE((up.state / "run" / name).stat().st_mode) == 0o600
    assert address_file(up.state).exists()
    assert up.stop() == 0, up.text()
    assert_nothing_left(up)


def redis_of(up: Program) -> psutil.Process | None:
    """Its private Redis; None while there is none."""
    for process in psutil.Process(up.popen.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "redis" in process.name() or "valkey" in process.name():
                return process
    return None


def test_what_dies_on_a_full_disk_is_back(programs: Programs, model: Path) -> None:
    """Files were removed before each start and could not be written again: nothing that had died came back."""
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    up.until("Ctrl-C stops everything")
    port, key = port_of(up), (up.state / "first-key").read_text().strip()
    first = redis_of(up)
    assert first is not None
    with full_disk(pid=up.popen.pid):  # it can't write its lines either
        first.kill()
        killed(up, "gateway.cli", "gateway")
        wait_until(lambda: redis_of(up) not in (None, first), lambda: "no Redis is back")
        wait_until(lambda: is_answered(port, key, "tale"), lambda: "no gateway is back")
    assert up.stop() == 0, up.text()
    assert_nothing_left(up)


def save(client: Client, full: Path | None) -> None:
    """Save a slot some times, to a disk that is full: what the dead worker kept there goes, maybe a moment later."""
    for _ in range(10):
        if full is not None:
            fill(full)
        client.slots.save(0, "kept")


@needs_disks
@pytest.mark.parametrize("trouble", [filled, read_only])
def test_what_dies_is_back_on_a_true_disk_in_trouble(
    programs: Programs, model: Path, tmp_path: Path, trouble: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """A worker whose `cache_dir` was read-only did not start again, and ended everything with it. Another team's stream
    goes on, or ends because its process was killed; what is stored is refused with the reason."""
    with small_disk(tmp_path / "disk", 16) as disk:
        programs.state = disk / "state"
        folders = {"PADDOCK_CACHE_DIR": str(disk / "cache"), "PADDOCK_SLOT_SAVE_DIR": str(disk / "slots")}
        up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL, **folders)
        up.until("Ctrl-C stops everything")
        port, key = port_of(up), (up.state / "first-key").read_text().strip()
        with Client(f"http://127.0.0.1:{port}", key) as client:
            stream = client.complete("Once upon", stream=True, n_predict=100, ignore_eos=True)
            next(stream)
            with trouble(disk):
                *_, last = stream
                assert last.tokens_predicted == 100
                for ending in (("workers.cli", "worker"), ("gateway.cli", "gateway")):
                    killed(up, *ending)
                    wait_until(lambda: is_answered(port, key, "tale"), up.text)
                if trouble is read_only:
                    assert f"{disk / 'cache'} takes no files now (Read-only file system)" in up.text()
                with pytest.raises(Unavailable, match="is full" if trouble is filled else "worker's log says why"):
                    save(client, disk if trouble is filled else None)
            redis = redis_of(up)
            assert redis is not None
            redis.kill()
            if trouble is read_only:
                killed(up, "workers.cli", "worker")  # it has its folders open by the mount that is gone
            wait_until(lambda: is_answered(port, key, "tale"), up.text)
            assert client.slots.save(0, "kept").n_saved
        assert up.stop() == 0, up.text()
        assert "Traceback" not in up.text()
        assert_nothing_left(up)


@needs_disks
def test_on_a_read_only_disk_redis_waits_and_a_death_is_told_once(
    programs: Programs, model: Path, tmp_path: Path
) -> None:
    """Redis can't make its socket there; what runs goes on without it. What the first worker was running was told of
    each that died after it."""
    with small_disk(tmp_path / "disk", 16) as disk:
        programs.state = disk / "state"
        up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
        up.until("Ctrl-C stops everything")
        port, key = port_of(up), (up.state / "first-key").read_text().strip()
        with Client(f"http://127.0.0.1:{port}", key) as client:
            stream = client.complete("Once upon", stream=True, n_predict=100, ignore_eos=True)
            next(stream)
            with read_only(disk):
                killed(up, "workers.cli", "worker")
                up.until("worker-0 died (SIGKILL) while running request ")
                stream.close()
                wait_until(lambda: is_answered(port, key, "tale"), up.text)
                killed(up, "workers.cli", "worker")
                wait_until(lambda: up.text().count("worker-0 died (SIGKILL)") >= 3, up.text)
                wait_until(lambda: is_answered(port, key, "tale"), up.text)
                redis = redis_of(up)
                assert redis is not None
                time.sleep(KNOWN_AFTER_S + keys.GATEWAY_INTERVAL_S)  # before, the gateway knows no share of the slots
                redis.kill()
                up.until("paddock: redis died (SIGKILL); starting it again")
                up.until(
                    f"paddock: redis can't be started ([Errno 30] Read-only file system: '{up.state}/run/redis.sock')"
                )
                wait_until(lambda: is_answered(port, key, "tale"), up.text)
            wait_until(lambda: redis_of(up) not in (None, redis), up.text)
            wait_until(lambda: is_answered(port, key, "tale"), up.text)
            killed(up, "workers.cli", "worker")
            wait_until(lambda: up.text().count("worker-0 died (SIGKILL); starting") >= 3, up.text)
            wait_until(lambda: is_answered(port, key, "tale"), up.text)
        assert up.stop() == 0, up.text()
        assert up.text().count("while running request ") == 1, up.text()
        assert "before died" not in up.text()
        assert "Traceback" not in up.text()
        assert_nothing_left(up)


def test_a_first_key_that_can_not_be_read_ends_nothing(programs: Programs, model: Path) -> None:
    """A file system that fails ended everything at the last moment, when all was ready and being called."""
    up = programs.start(
        "up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL, PADDOCK_API_KEY="pk-given"
    )
    wait_until((up.state / "run").is_dir, up.text)
    (up.state / "first-key").symlink_to("/proc/self/mem")
    up.until("Ctrl-C stops everything")
    assert f"paddock: {up.state / 'first-key'} can't be read (Input/output error)" in up.text()
    assert ask(port_of(up), "pk-given", "tale") in ("stop", "length")
    assert up.stop() == 0, up.text()
    assert_nothing_left(up)


def test_a_run_folder_that_can_not_be_read_ends_nothing(programs: Programs, model: Path) -> None:
    """The look for Redis' socket ended everything. What dies meanwhile is back when the folder is."""
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    up.until("Ctrl-C stops everything")
    port, key = port_of(up), (up.state / "first-key").read_text().strip()
    with unreadable(up.state / "run"):
        killed(up, "workers.cli", "worker")
        killed(up, "gateway.cli", "gateway")
        up.until("paddock: worker-0 can't be started ([Errno 36] File name too long")
        up.until("paddock: gateway can't be started ([Errno 36] File name too long")
        time.sleep(3 * SOCKET_LOOK_S)
        assert up.popen.poll() is None, up.text()
    wait_until(lambda: is_answered(port, key, "tale"), up.text)
    assert "redis is started again" not in up.text()
    assert up.stop() == 0, up.text()
    assert_nothing_left(up)


def test_streams_drain_where_no_file_can_be_removed(programs: Programs, model: Path) -> None:
    """The first file that a disk did not let go ended all processes, in the middle of their streams."""
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", "--slots", "1", "--workers", "1")
    up.until("Ctrl-C stops everything")
    key = (up.state / "first-key").read_text().strip()
    with Client(f"http://127.0.0.1:{port_of(up)}", key) as client, unreadable(up.state / "run"):
        stream = client.complete("Once upon", stream=True, n_predict=600, ignore_eos=True)
        next(stream)
        assert up.stop() == 0, up.text()
        *_, last = stream
        assert last.stop
        assert last.tokens_predicted == 600
    for name in ("address", "worker-0.json", "redis.sock", "redis.acl", "lock"):
        assert f"paddock: {up.state / 'run' / name} can't be removed: File name too long" in up.text()
    assert "Traceback" not in up.text()
    wait_until(lambda: not up.survivors(), lambda: f"still running: {up.survivors()}")


@pytest.mark.parametrize("gone", ["redis.sock", "."], ids=["the name", "its folder"])
def test_redis_keeps_what_it_holds_where_its_sockets_name_is_gone(programs: Programs, model: Path, gone: str) -> None:
    """It was started again: stored responses and streams, keys and leases were lost."""
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    up.until("Ctrl-C stops everything")
    port, key = port_of(up), (up.state / "first-key").read_text().strip()
    first, link = redis_of(up), up.state / "run" / "redis.sock"
    wait_until((up.state / "redis.sock").exists, lambda: "no second name")
    for times in (1, 2):
        if gone == ".":
            removed(link.parent)
        else:
            link.unlink()
        up.until(f"paddock: {link} was gone; it has its name again", times)
    killed(up, "workers.cli", "worker")
    killed(up, "gateway.cli", "gateway")
    up.until("worker-0 died (SIGKILL)")
    up.until("gateway died (SIGKILL)")
    wait_until(lambda: is_answered(port, key, "tale"), up.text)
    assert redis_of(up) == first
    assert stat.S_IMODE(link.stat().st_mode) == 0o700
    assert up.stop() == 0, up.text()
    assert_nothing_left(up)
    assert not (up.state / "redis.sock").exists()


def test_redis_is_started_again_where_its_socket_has_no_name_left(programs: Programs, model: Path) -> None:
    """A worker that was started then never registered, until somebody killed Redis."""
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    up.until("Ctrl-C stops everything")
    port, key = port_of(up), (up.state / "first-key").read_text().strip()
    link = up.state / "run" / "redis.sock"
    (up.state / "redis.sock").unlink(missing_ok=True)
    link.unlink()
    killed(up, "workers.cli", "worker")
    up.until(f"paddock: {link} is gone; redis is started again")
    wait_until(lambda: is_answered(port, key, "tale"), up.text)
    assert link.exists()
    assert "redis died" not in up.text()
    assert up.stop() == 0, up.text()
    assert_nothing_left(up)


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)], ids=str)
def test_it_serves_without_input_and_output(programs: Programs, model: Path, closed: tuple[int, ...]) -> None:
    """The listener took the free number, and the gateway's own input or output its place; it ended with 2."""
    up = programs.start_without(closed, "up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    address = address_file(up.state)
    wait_until(lambda: address.exists() or up.popen.poll() is not None, up.text)
    assert up.popen.poll() is None, up.text()
    port = int(address.read_text().strip().rsplit(":", 1)[1])
    assert ask(port, (up.state / "first-key").read_text().strip(), "tale") in ("stop", "length")
    for number in closed:
        assert os.readlink(f"/proc/{up.popen.pid}/fd/{number}") == os.devnull
    assert up.stop() == 0, up.text()
    assert "Traceback" not in up.text()
    assert_nothing_left(up)


def test_a_taken_port_is_said_before_anything_starts(programs: Programs, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        up = programs.start("up", "--port", str(port), "--model", str(model))
        assert up.wait() == Exit.PORT_TAKEN
    assert up.text() == f"paddock: port {port} on 127.0.0.1 is in use; give another with --port\n"
    assert not up.state.exists()


@pytest.mark.parametrize(
    ("flags", "content", "code", "said"),
    [
        (("--model", "none.gguf"), b"", Exit.BAD_MODEL, "no file"),
        (("--model", "{file}"), b"not a model, but long enough to look at", Exit.BAD_MODEL, "is not a GGUF file"),
        (("--catalog", "{file}"), b"models: [{name: m, path: gone.gguf}]", Exit.BAD_MODEL, "model m: no file"),
        (("--catalog", "{file}"), b"models: [{name: m}]", Exit.USAGE, "models[0] (m): give exactly one source"),
        (("--model", "a", "--hf", "o/r"), b"", Exit.USAGE, "--model and --hf each say what to serve"),
        (("--redis-url", "mysql://x"), b"", Exit.USAGE, "redis_url"),
        (
            ("--catalog", "{file}"),
            b"models: [{name: m, path: m, workers: 0}]",
            Exit.USAGE,
            "each model has `workers: 0`",
        ),
        (("--api-keys", '[{"name": "a"}]'), b"", Exit.USAGE, "api_keys: Object missing required field `sha256`"),
        (("--ctx", "99999999"), b"", Exit.USAGE, "ctx: '99999999' is not a whole number from 0 to 16777216"),
        (("--state-dir", "{file}/below"), b"", Exit.USAGE, "with --state-dir"),
    ],
)
def test_what_can_be_known_to_be_wrong_is_one_line(
    programs: Programs, flags: tuple[str, ...], content: bytes, code: Exit, said: str
) -> None:
    file = programs.folder / "file"
    file.write_bytes(content)
    up = programs.start("up", "--port", "0", *(flag.replace("{file}", str(file)) for flag in flags))
    assert up.wait() == code, up.text()
    (line,) = up.text().splitlines()
    assert line.startswith("paddock: ")
    assert said in line


def test_a_cut_off_model_ends_everything(programs: Programs, model: Path) -> None:
    """The file begins like a model, so only a worker can tell; its one line is what the user sees."""
    cut = programs.folder / "cut.gguf"
    cut.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    up = programs.start("up", "--port", "0", *SMALL, "--model", str(cut))
    assert up.wait() == Exit.BAD_MODEL, up.text()
    lines = [line for line in up.text().splitlines() if "can't serve" in line]
    assert len(lines) == 1, up.text()
    assert "Traceback" not in up.text()
    assert_nothing_left(up)


def test_a_stop_while_loading_and_a_killed_up_leave_nothing(programs: Programs, model: Path) -> None:
    up = programs.start("up", "--port", "0", "--model", str(model), *SMALL)
    up.until("redis ready")
    assert up.stop(signal.SIGHUP) == 0, up.text()
    assert_nothing_left(up)

    killed = programs.start("up", "--port", "0", "--model", str(model), *SMALL)
    killed.until("redis ready")
    wait_until(
        lambda: len(killed.family()) >= 4,  # itself, Redis, a worker, the gateway
        lambda: str(killed.family()),
    )
    killed.popen.kill()
    killed.wait()
    wait_until(lambda: not killed.survivors(), lambda: f"orphans: {killed.survivors()}")

    # Its lock died with it, and its socket does not bother the next one.
    assert (killed.state / "run" / "redis.sock").exists()
    after = programs.start("up", "--port", "0", "--model", str(model), *SMALL)
    after.until("redis ready")
    assert after.stop(signal.SIGINT) == 0, after.text()
    assert_nothing_left(after)


def test_a_gateway_that_will_not_stop_is_hurried(programs: Programs, model: Path) -> None:
    """The second Ctrl-C ends even a frozen gateway. On the way: a model of the hub, a Redis of the user's own."""
    repository = {"owner/tale-GGUF": {"tale-Q8_0.gguf": model.read_bytes()}}
    with RedisServer() as own, Hub(repository) as hub:
        flags = ("--hf", "owner/tale-GGUF:q8_0", "--drain-s", "600", "--redis-url", own.url)
        up = programs.start("up", "--port", "0", *SMALL, *flags, **hub.environment)
        up.until("Ctrl-C stops everything")
        assert "paddock: worker-0 ready: tale (" in up.text()
        assert not (up.state / "run" / "redis.sock").exists()
        hurry(up)
        with redis.Redis(unix_socket_path=str(own.socket)) as client:
            assert client.ping()


def hurry(up: Program) -> None:
    gateway = next(p for p in up.family().values() if p.cmdline()[-2:] == ["gateway.cli", "gateway"])
    gateway.suspend()
    up.send(signal.SIGINT)
    up.until("streams drain first")
    assert up.stop(signal.SIGINT) == 0, up.text()
    assert "paddock: stopping at once" in up.text()
    assert_nothing_left(up)


def test_no_wheel_and_no_checkout_is_needed_to_see_the_version() -> None:
    """The program itself needs the standard library only."""
    code = "import sys; sys.argv = ['paddock', '--version']; from gateway.cli import main; sys.exit(main())"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [psutil.Process().exe(), "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"],
        capture_output=True,
        text=True,
        env={**os.environ},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("paddock ")


def test_a_disk_that_takes_no_address_file_keeps_nobody_from_being_served(programs: Programs, model: Path) -> None:
    up = programs.start("up", "--port", "0", "--model", str(model), "--alias", "tale", *SMALL)
    wait_until((up.state / "run").is_dir, up.text)
    address_file(up.state).mkdir()
    up.until("Ctrl-C stops everything")
    told = f"paddock: {address_file(up.state)} can't be written (Is a directory); `paddock chat` needs --url http"
    assert told in up.text()
    key = (up.state / "first-key").read_text().strip()
    assert ask(port_of(up), key, "tale") in ("stop", "length")
    address_file(up.state).rmdir()
    assert up.stop(signal.SIGINT) == 0, up.text()
    assert_nothing_left(up)
