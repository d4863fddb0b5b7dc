"""A browser, as far as signing in needs one: it follows redirects, and keeps cookies as browsers do."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

import requests

from tests.support.loopback import calling_from

MAX_REDIRECTS = 10
TIMEOUT_S = 20


class Browser:
    """One browser, with cookies of its own."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.session = calling_from(address)
        self.visited: list[str] = []
        """Addresses that it went to, in order."""

    def open(self, url: str, stop_at: str = "") -> requests.Response:
        """Open an address and follow redirects; return the last answer.

        `stop_at`: beginning of an address that it is not to go to; the answer that leads there is returned."""
        for _ in range(MAX_REDIRECTS):
            self.visited.append(url)
            answer = self.session.get(url, allow_redirects=False, timeout=TIMEOUT_S)
            if not answer.is_redirect:
                return answer
            url = answer.headers["location"]
            if url.startswith("/"):
                parts = urlsplit(answer.url)
                url = f"{parts.scheme}://{parts.netloc}{url}"
            if stop_at and url.startswith(stop_at):
                return answer
        raise AssertionError("redirects without end")

    def cookie(self, name: str) -> str | None:
        """Return the value of a cookie; None: it has none."""
        return next((cookie.value for cookie in self.session.cookies if cookie.name == name), None)


if __name__ == "__main__":  # as the variable BROWSER names it: `python -m tests.support.browser %s`
    Browser().open(sys.argv[1])
