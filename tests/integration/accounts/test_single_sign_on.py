"""What single sign-on writes into the database, on SQLite and on PostgreSQL: users, sessions, and what is under way."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import func, select, update

from accounts.access import records
from accounts.access.changes import Changes, PublishedLater
from accounts.access.mirror import Adoption
from accounts.access.records import KEY, TEAM, USER, Stored
from accounts.access.rights import system
from accounts.database.database import Database
from accounts.database.schema import sessions
from accounts.errors import Forbidden
from accounts.oidc.people import Grant, Person
from accounts.protocol.caller import Caller
from accounts.protocol.records import UserRecord, digest
from accounts.protocol.sign_on import Provider, SignOn
from accounts.sso.members import MAX_SESSIONS, METADATA, Members
from accounts.sso.pending import Device, Login, Pending

ISSUER = "https://id.example.com"
PROVIDER = Provider(issuer=ISSUER, client_id="paddock")
SIGN_ON = SignOn(providers=(PROVIDER,), session_s=3600)
CALLER = Caller(address="192.0.2.1", request_id="req-1")
ANN = Person("ann@example.com", "ann@example.com", "7", ISSUER, (Grant("red", "user"),))
LOGIN = Login(browser="b", issuer=ISSUER, nonce="n", code_verifier="v", redirect_uri="r")


@pytest.fixture
def changes(database: Database) -> Changes:
    Adoption(database, "secret").prepare()
    return Changes(database, PublishedLater())


@pytest.fixture
def members(changes: Changes) -> Members:
    return Members(changes, SIGN_ON)


def user_of(database: Database, name: str = ANN.user) -> Stored[UserRecord] | None:
    with database.reading() as connection:
        return records.find(connection, USER, name)


def sessions_of(database: Database, name: str = ANN.user) -> list[str]:
    with database.reading() as connection:
        return [key.record.name for key in records.page(connection, KEY, (KEY.table.c.user == name,), "", 1000)]


def num_rows(database: Database) -> int:
    with database.reading() as connection:
        return int(connection.execute(select(func.count()).select_from(sessions)).scalar_one())


def test_the_first_sign_in_makes_user_team_and_key(members: Members, database: Database) -> None:
    begun = time.time()
    session = members.sign_in(ANN, CALLER)
    found = user_of(database)
    assert found is not None
    assert (found.record.teams, found.record.admin, found.email) == ({"red": "user"}, False, "ann@example.com")
    with database.reading() as connection:
        assert records.find(connection, TEAM, "red") is not None
        key = records.get(connection, KEY, session.name).record
    assert (key.sha256, key.team, key.user, key.granted_role) == (digest(session.key), "red", ANN.user, "user")
    assert key.expires_at is not None
    assert begun + 3600 <= key.expires_at <= time.time() + 3600


def test_what_the_rules_give_comes_and_goes_and_what_was_given_by_hand_stays(
    members: Members, changes: Changes, database: Database
) -> None:
    members.sign_in(ANN, CALLER)
    with changes.begin(system("test")) as change:
        before = records.get(change.connection, USER, ANN.user)
        by_hand = replace(before.record, teams={**before.record.teams, "default": "manager"})
        change.save("update", USER, before, replace(before, record=by_hand, metadata={**before.metadata, "floor": 3}))
    lead = replace_grants(Grant("red", "manager"), Grant("ops", "admin"))
    members.sign_in(lead, CALLER)
    found = user_of(database)
    assert found is not None
    assert found.record.teams == {"default": "manager", "red": "manager", "ops": "manager"}
    assert (found.record.admin, found.metadata["floor"]) == (True, 3)
    assert found.metadata[METADATA]["subject"] == "7"
    members.sign_in(replace_grants(Grant("red", "user")), CALLER)
    found = user_of(database)
    assert found is not None
    assert (found.record.teams, found.record.admin) == ({"default": "manager", "red": "user"}, False)


def replace_grants(*grants: Grant) -> Person:
    return Person(ANN.user, ANN.email, ANN.subject, ANN.issuer, grants)


def test_an_admin_by_hand_stays_one(members: Members, changes: Changes, database: Database) -> None:
    with changes.begin(system("test")) as change:
        change.save("create", USER, None, Stored(record=UserRecord(name=ANN.user, admin=True)))
    assert members.sign_in(ANN, CALLER).role == "user"
    found = user_of(database)
    assert found is not None
    assert found.record.admin


def test_without_a_rule_the_users_own_teams_count(members: Members, changes: Changes) -> None:
    nobody = replace_grants()
    with pytest.raises(Forbidden, match="No team"):
        members.sign_in(nobody, CALLER)
    with changes.begin(system("test")) as change:
        record = UserRecord(name=ANN.user, teams={"default": "manager"})
        change.save("create", USER, None, Stored(record=record))
    session = members.sign_in(nobody, CALLER)
    assert (session.team, session.role) == ("default", "manager")


def test_who_may_not_come_leaves_nothing(changes: Changes, database: Database) -> None:
    strict = SignOn(providers=(replace(PROVIDER, create_users=False),))
    with pytest.raises(Forbidden, match="not known"):
        Members(changes, strict).sign_in(ANN, CALLER)
    assert user_of(database) is None
    assert num_rows(database) == 0


def test_sessions_end_when_there_are_too_many_and_when_they_expire(members: Members, database: Database) -> None:
    names = [members.sign_in(ANN, CALLER).name for _ in range(MAX_SESSIONS + 2)]
    assert sorted(sessions_of(database)) == sorted(names[2:])
    with database.transaction() as connection:
        old = sessions.c.value.in_(names[2:5])
        connection.execute(update(sessions).where(old).values(expires_at=time.time() - 1))
    members.sweep()
    assert sorted(sessions_of(database)) == sorted(names[5:])
    assert num_rows(database) == MAX_SESSIONS - 3


def test_a_sign_out_ends_a_session_and_no_other_key(members: Members, database: Database) -> None:
    session = members.sign_in(ANN, CALLER)
    assert not members.sign_out(replace(CALLER, key="ci", user=ANN.user))
    assert members.sign_out(replace(CALLER, key=session.name, user=ANN.user))
    assert not members.sign_out(replace(CALLER, key=session.name, user=ANN.user))
    assert sessions_of(database) == []


def test_what_is_under_way_is_taken_once(database: Database) -> None:
    pending = Pending(database)
    secret = pending.put(LOGIN, 60)
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: pending.take(secret, Login), range(16)))
    assert [one for one in taken if one is not None] == [LOGIN]


def test_what_is_under_way_is_found_by_its_kind_and_in_time(database: Database) -> None:
    pending = Pending(database)
    device = Device(issuer=ISSUER, device_code="theirs")
    secret = pending.put(device, 60)
    assert pending.take(secret, Login) is None
    assert (pending.find(secret, Device), pending.find("other", Device)) == (device, None)
    late = pending.put(LOGIN, -1)
    assert pending.find(late, Login) is None
    assert num_rows(database) == 2
    pending.sweep()
    assert num_rows(database) == 1


def test_nothing_that_a_browser_holds_is_stored(database: Database, tmp_path: Path) -> None:
    pending = Pending(database)
    secret = pending.put(LOGIN, 60)
    with database.reading() as connection:
        row = connection.execute(select(sessions)).one()
    assert secret not in str(row)
