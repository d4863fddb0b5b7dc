"""The directory of access: organisations, teams, users, aliases and prices. It makes the principal of a key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accounts.protocol.records import (
    MOST_URGENT_PRIORITY,
    NO_LIMITS,
    NO_TEAM_LIMITS,
    STORAGE_LIMITS,
    AccessRecord,
    AliasRecord,
    Limits,
    OrganisationRecord,
    PriceListRecord,
    SubjectKind,
    SubjectRecord,
    TeamLimits,
    TeamRecord,
    UserRecord,
)
from gateway.call import CallBounds, Principal, Subject


class Directory:
    """All records of access but those of keys. It is empty without an accounts service: a team is a mere name then."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each change: a principal that was made at another version is made anew."""
        self.prices = PriceListRecord()
        self._organisations: dict[str, OrganisationRecord] = {}
        self._teams: dict[str, TeamRecord] = {}
        self._users: dict[str, UserRecord] = {}
        self._aliases: dict[str, Subject] = {}

    def put(self, record: SubjectRecord) -> None:
        """Add a record, or replace the one of its kind and name."""
        match record:
            case OrganisationRecord():
                self._organisations[record.name] = record
            case TeamRecord():
                self._teams[record.name] = record
            case UserRecord():
                self._users[record.name] = record
            case AliasRecord():
                self._aliases[record.name] = Subject("alias", record.name, record.limits)
            case PriceListRecord():
                self.prices = record
        self.version += 1

    def remove(self, record: SubjectRecord) -> None:
        """Forget the record of this kind and name."""
        match record:
            case OrganisationRecord():
                self._organisations.pop(record.name, None)
            case TeamRecord():
                self._teams.pop(record.name, None)
            case UserRecord():
                self._users.pop(record.name, None)
            case AliasRecord():
                self._aliases.pop(record.name, None)
            case PriceListRecord():
                self.prices = PriceListRecord()
        self.version += 1

    def alias(self, name: str) -> Subject | None:
        """Return the subject that counts for all calls of a model name; None: the name has no limits."""
        return self._aliases.get(name)

    def user(self, name: str) -> UserRecord | None:
        """Return the record of a user; None: there is none."""
        return self._users.get(name)

    def storage(self, name: str) -> TeamLimits:
        """Return the limits of what a team stores: the least of its own and its organisation's."""
        team = self._teams.get(name) or TeamRecord(name=name)
        organisation = self._organisations.get(team.organisation)
        of_both = [team.limits] if organisation is None else [team.limits, organisation.limits]
        if all(limits is NO_TEAM_LIMITS for limits in of_both):
            return NO_TEAM_LIMITS
        least = dict[str, Any]()
        for field in STORAGE_LIMITS:
            if found := [most for limits in of_both if (most := getattr(limits, field)) is not None]:
                least[field] = min(found)
        return TeamLimits(**least)

    def principal(self, record: AccessRecord) -> Principal:
        """Return the holder of the key."""
        team = self._teams.get(record.team) or TeamRecord(name=record.team)
        role = record.granted_role
        allowed = [frozenset(names) for names in (record.aliases, team.aliases) if names is not None]
        min_priority = MOST_URGENT_PRIORITY if role == "admin" else record.min_priority
        max_tokens = [most for most in (record.max_tokens, *self._most_tokens(record, team)) if most is not None]
        return Principal(
            key_id=record.name,
            team=record.team,
            aliases=frozenset.intersection(*allowed) if allowed else None,
            admin=role == "admin",
            weight=record.weight,
            bounds=CallBounds(min_priority, min(max_tokens, default=None), record.answer_timeout_s),
            organisation=team.organisation,
            user=record.user,
            role=role,
            names_end_users=record.names_end_users,
            subjects=self._subjects(record, team),
            blocked=self._blocked(record, team),
        )

    def _blocked(self, record: AccessRecord, team: TeamRecord) -> str:
        organisation, user = self._organisations.get(team.organisation), self._users.get(record.user)
        if record.blocked:
            return f"The key {record.name!r}"
        if user is not None and user.blocked:
            return f"The user {user.name!r}"
        if team.blocked:
            return f"The team {team.name!r}"
        if organisation is not None and organisation.blocked:
            return f"The organisation {organisation.name!r}"
        return ""

    def _most_tokens(self, record: AccessRecord, team: TeamRecord) -> Iterable[int | None]:
        return (subject.limits.max_tokens for subject in self._subjects(record, team))

    def _subjects(self, record: AccessRecord, team: TeamRecord) -> tuple[Subject, ...]:
        """Return the subjects with limits that a call with the key counts for."""
        organisation, user = self._organisations.get(team.organisation), self._users.get(record.user)
        named: tuple[tuple[SubjectKind, OrganisationRecord | TeamRecord | UserRecord | AccessRecord | None], ...] = (
            ("organisation", organisation),
            ("team", team),
            ("user", user),
            ("key", record),
        )
        return tuple(
            Subject(kind, each.name, each.limits)
            for kind, each in named
            if each is not None and _limits_calls(each.limits)
        )


def _limits_calls(limits: Limits) -> bool:
    """Return whether any of the limits is one of calls."""
    return any(getattr(limits, field) != getattr(NO_LIMITS, field) for field in NO_LIMITS.__struct_fields__)
