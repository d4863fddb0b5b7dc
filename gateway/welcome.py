"""What `paddock up` prints when it is ready: address, key, and two snippets that work when pasted."""

from __future__ import annotations

import json
from pathlib import Path

PROMPT = "Tell me a short story about a fox."


def welcome(address: str, key: str, key_file: Path, models: tuple[str, ...], logs: Path) -> str:
    """`address` without `/v1`. The snippets begin at the margin, so that they can be pasted as they are."""
    headers = f"-H 'Authorization: Bearer {key}' -H 'Content-Type: application/json'"
    body = {"model": models[0], "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
    kept = f" (kept in {key_file})" if key_file.is_file() else ""
    return f"""
  address  {address}/v1
  API key  {key}{kept}
  models   {", ".join(models)}
  logs     {logs}

# in a shell
curl -N {address}/v1/chat/completions {headers} -d '{json.dumps(body)}'

# in Python, with nothing installed; any OpenAI client takes the same address (base_url) and key (api_key)
import json, urllib.request
body = json.dumps({body!r}).encode()
ask = urllib.request.Request("{address}/v1/chat/completions", body, {{"Authorization": "Bearer {key}"}})
for line in urllib.request.urlopen(ask):
    if line.startswith(b"data: {{"):
        print(json.loads(line[6:])["choices"][0]["delta"].get("content") or "", end="", flush=True)

Ctrl-C stops everything.
"""
