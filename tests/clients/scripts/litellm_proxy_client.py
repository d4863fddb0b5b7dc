"""Calls LiteLLM's client of its proxy as it is told: a line in says what, a line out says what came of it.

A line in is a JSON list: the client's manager, its method, and the method's keyword arguments. A line out is an object:
`answer`, or `error`, the class of the exception, with the `status` and `body` of the answer behind it.
"""

from __future__ import annotations

import json
import os
import sys

import requests
from litellm.proxy.client import Client, UsersManagementClient


def main():
    url, key = os.environ["LITELLM_PROXY_URL"], os.environ["LITELLM_PROXY_API_KEY"]
    client = Client(url, key)
    managers = {
        "http": client.http,
        "keys": client.keys,
        "models": client.models,
        "teams": client.teams,
        "users": UsersManagementClient(url, key),
    }
    for line in sys.stdin:
        manager, method, arguments = json.loads(line)
        try:
            told = {"answer": getattr(managers[manager], method)(**arguments)}
        except Exception as error:  # noqa: BLE001 - the client raises Exception itself, and whatever it raises is told
            cause = getattr(error, "orig_exception", error)
            answer = getattr(cause, "response", None)
            told = {"error": type(error).__name__, "message": str(error)}
            if isinstance(answer, requests.Response):
                told |= {"status": answer.status_code, "body": answer.text}
        print(json.dumps(told), flush=True)


main()
