"""Keeps a loop going while Redis is away: one log line when it goes, one when it is back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import StoreUnavailable
from gateway.store.trouble import NO_ANSWER, remedy_for

log = logging.getLogger(__name__)


class Outage:
    """The outages that one loop meets. No answer of Redis ends the loop, and so the process: the last data is kept."""

    def __init__(self, lost: str, meanwhile: str, back: str) -> None:
        """Texts for the log: something can't be done, what holds meanwhile, it can again (empty: not logged)."""
        self._lost = lost
        self._meanwhile = meanwhile
        self._back = back
        self.lasts = False

    @contextmanager
    def outlived(self) -> Iterator[None]:
        """Run one round of the loop; an error in it ends the round only."""
        try:
            yield
        except (StoreUnavailable, *NO_ANSWER) as error:
            cause = error.__cause__ if isinstance(error, StoreUnavailable) and error.__cause__ else error
            self._begin(f"{type(cause).__name__}: {cause}; {remedy_for(cause)}")
        except Exception as error:  # the loop's edge: whatever others have written there, the service goes on
            if not self.lasts:
                log.exception("what Redis holds was not understood")
            self._begin(f"{type(error).__name__}: {error}")
        else:
            if self.lasts and self._back:
                log.info("%s", self._back)
            self.lasts = False

    def _begin(self, why: str) -> None:
        if not self.lasts:
            log.warning("%s (%s); %s", self._lost, why, self._meanwhile)
        self.lasts = True
