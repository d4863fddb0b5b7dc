"""Values that no database holds, or that can't be compared with a column: whoever sends them is told so."""

from __future__ import annotations

import base64
from typing import Any

from accounts.protocol.caller import Caller
from tests.support.admin_api import ADMIN, AdminApi, caller_of

NUL = "\0"
HUGE = 10**30


def cursor(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


QUERIES = (
    *(f"/admin/keys?{name}=%00" for name in ("team", "user")),
    *(f"/admin/usage?{name}=%00" for name in ("team", "key", "user", "end_user", "alias", "model", "request_id")),
    *(f"/admin/audit?{name}=%00" for name in ("kind", "subject", "actor", "team")),
    *(f"/admin/{kind}/%00" for kind in ("keys", "teams", "users", "organisations", "aliases")),
    *(f"/admin/{kind}?cursor={cursor(NUL)}" for kind in ("keys", "teams", "users", "audit")),
    f"/admin/audit?cursor={cursor(str(HUGE))}",
    f"/admin/usage?cursor={cursor(f'[1.5,{HUGE}]')}",
    *(f"/admin/usage/summary?from=0&group_by=model&cursor={cursor(value)}" for value in ("[5]", '["\\u0000"]')),
    *(f"/admin/usage/summary?from=0&group_by=hour&cursor={cursor(value)}" for value in ('["x"]', f"[{HUGE}]")),
    "/admin/usage/summary?from=0&group_by=key&user=%00",
    "/admin/usage/export?request_id=%00",
    "/admin/budgets?subject=%00",
    *(f"/key/list?{name}=%00" for name in ("user_id", "team_id", "key_alias", "key_hash", "organization_id")),
    f"/key/list?page={HUGE}",
    "/key/info?key=%00",
    "/team/info?team_id=%00",
    "/user/info?user_id=%00",
    *(f"/spend/logs?{name}=%00" for name in ("user_id", "api_key", "request_id")),
    "/spend/logs?start_date=0001-01-01&end_date=8999-12-31",
)
BODIES: tuple[tuple[str, str, Any], ...] = (
    *(("POST", "/admin/keys", {"name": "odd", **more}) for more in ({"user": NUL}, {"team": NUL})),
    ("POST", "/admin/keys", {"metadata": {"note": NUL}}),
    ("POST", "/admin/keys", {"aliases": [NUL]}),
    *(
        ("POST", "/admin/keys", {"limits": {"budgets": [{"amount": 1, "time_zone": zone}]}})
        for zone in (NUL, "America", "../../etc/passwd", "/etc/passwd", "tzdata.zi")
    ),
    ("POST", "/admin/keys", {"expires_at": 1e308}),
    ("POST", "/admin/keys", {"max_tokens": HUGE}),
    ("POST", "/admin/keys", {"answer_timeout_s": 1e308}),
    ("PATCH", "/admin/keys/small", {"version": HUGE}),
    ("PATCH", "/admin/keys/small", {"metadata": {NUL: HUGE}}),
    ("DELETE", f"/admin/keys/none?version={HUGE}", None),
    *(("POST", path, {"key": NUL}) for path in ("/key/update", "/key/block", "/key/regenerate")),
    ("POST", "/key/generate", {"user_id": NUL}),
    ("POST", "/key/generate", {"team_id": NUL}),
    ("POST", "/key/generate", {"duration": "9" * 5000 + "d"}),
    ("POST", "/key/generate", {"duration": "9" * 400 + "d"}),
    ("POST", "/key/delete", {"keys": [NUL]}),
    ("POST", "/admin/users", {"name": "odd@example.com", "email": NUL}),
    ("POST", "/admin/users", {"name": "odd@example.com", "teams": {NUL: "user"}}),
    ("POST", "/admin/users", {"name": "odd@example.com", "metadata": {"note": NUL}}),
    ("POST", "/user/new", {"user_email": f"{NUL}@example.com"}),
    ("POST", "/team/new", {"team_alias": "t", "metadata": {"note": NUL}}),
    ("POST", "/admin/prices", {"model": NUL, "per_million_prompt": 1}),
    ("POST", "/admin/prices", {"model": "m", "valid_from": 1e308}),
    ("POST", "/admin/aliases", {"name": NUL}),
    ("POST", "/admin/apply", {"teams": [{"name": NUL}]}),
)


async def test_no_value_is_a_fault_of_the_service(api: AdminApi) -> None:
    await api.post("/admin/teams", {"name": "red"})
    await api.post("/admin/keys", {"name": "lead", "team": "red", "role": "manager"})
    await api.post("/admin/keys", {"name": "small", "team": "red"})
    callers: tuple[Caller, ...] = (ADMIN, caller_of("lead", "red", "manager"), caller_of("small", "red", "user"))
    faults: list[str] = []
    for caller in callers:
        for method, path, body in (*(("GET", path, None) for path in QUERIES), *BODIES):
            answer = await api.ask(method, path, body, caller)
            if answer.status_code >= 500:
                faults.append(f"{caller.role} {method} {path} {str(body)[:60]}: {answer.status_code} {answer.text}")
    assert not faults, "\n".join(faults)
