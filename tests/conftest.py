"""What holds for every test: no setting of the person who runs them; where the shared models lie."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from workers.process.log_lines import UnblockedHandler

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
LONGEST_FIRST = ("security", "fault", "load", "e2e", "integration")
"""Folders whose files take long: begun first, so that no core is idle while the last file of a run takes its time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failed-to", type=Path, help="file that ids of failed tests are written to, a line each")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if to := config.getoption("failed_to"):
        failed = (*terminalreporter.getreports("failed"), *terminalreporter.getreports("error"))
        to.write_text("".join(f"{nodeid}\n" for nodeid in dict.fromkeys(report.nodeid for report in failed)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders with the longest files first; a folder's files stay together, with what they share."""
    tests = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=rank)


def pytest_configure() -> None:
    # How long one example takes says nothing on a machine that runs others as well.
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")
    for name in [name for name in os.environ if name.startswith("PADDOCK_")]:
        del os.environ[name]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun in the background of a shell: programs that tests press Ctrl-C on would inherit that it is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def shared_models() -> Path:
    """The folder of small models beside the checkout; skips where it is missing."""
    folder = SHARED / "models"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for Unix sockets, which pytest's own is not always."""
    folder = Path(tempfile.mkdtemp(prefix="pd-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """A test that configures logging, as commands do, takes no other test's lines away."""
    loggers = [logging.getLogger(name) for name in ("", "accounts", "gateway", "workers", "paddock")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)
    for handler in [handler for handler in logging.getLogger().handlers if isinstance(handler, UnblockedHandler)]:
        logging.getLogger().removeHandler(handler)  # or it writes to the file that is this test's stderr
        handler.close()
