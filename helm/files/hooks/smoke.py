"""`helm test`: the gateway lives, is ready, and answers one call of the model, with a key.

Arguments: the gateway's address, the model, and how long an answer may take in seconds. The key is in PADDOCK_API_KEY.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

address, model, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
deadline = time.monotonic() + timeout_s
PAUSE_S = 2


def ask(path, body=None):
    """The answer's JSON. Whoever may mend himself in time is asked again."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['PADDOCK_API_KEY']}"}
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(address + path, data=data, headers=headers)
        left_s = max(1.0, deadline - time.monotonic())
        try:
            with urllib.request.urlopen(request, timeout=left_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            told = error.read().decode(errors="replace")
            if error.code not in (429, 503) or time.monotonic() > deadline:
                sys.exit(f"{path}: {error.code}: {told}")
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{path}: {error}")
        time.sleep(PAUSE_S)


print("health:", ask("/health"))
print("ready:", ask("/ready"))
models = [entry["id"] for entry in ask("/v1/models")["data"]]
if model not in models:
    sys.exit(f"GET /v1/models lists {models}, and not {model}")
asked = {"model": model, "messages": [{"role": "user", "content": "Say one word."}], "max_tokens": 8}
answer = ask("/v1/chat/completions", asked)
if answer["usage"]["completion_tokens"] < 1:
    sys.exit(f"no token came: {answer}")
print("answer:", answer["choices"][0]["message"]["content"], answer["usage"])
