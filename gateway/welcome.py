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

# in Python, with the openai package
from openai import OpenAI
client = OpenAI(base_url="{address}/v1", api_key="{key}")
answer = client.chat.completions.create(model="{models[0]}", messages=[{{"role": "user", "content": "{PROMPT}"}}])
print(answer.choices[0].message.content)

Ctrl-C stops everything.
"""
