"""From the store and the settings to callers: what each key may do, with its team's and tenant's share put in.

A model must be allowed at every level that lists models. A name means what the key's aliases say, else the team's, else
the tenant's. Limits of all three levels hold together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from billing.budgets import Budget, Policy, Unit, Window
from gateway.access.records import LimitKind, Snapshot, StoredKey, StoredLimit, Subject
from gateway.access.roles import rights_of
from gateway.identity import Caller, Key
from gateway.limits.rules import Level, LimitRule, Outage, Resource
from tracing.record import Identity

_SUBJECT = {Level.KEY: "key", Level.TENANT: "tenant"}
Rules = Mapping[Subject, Sequence[LimitRule]]


def subjects_of(identity: Identity) -> tuple[Subject, Subject, Subject]:
    """Return whose limits and aliases hold for a caller: its key, its team, its tenant."""
    return (
        Subject(Level.KEY, identity.key_id),
        Subject.team(identity.tenant, identity.team),
        Subject(Level.TENANT, identity.tenant),
    )


def stored_keys(snapshot: Snapshot, fixed: Rules, currency: str) -> list[Key]:
    """Return the keys of the store. ``fixed``: limits of the settings; money is in ``currency``."""
    made: dict[str, Caller | None] = {}
    keys = []
    for digest, expires_ns, stored in snapshot.keys:
        if stored.id not in made:
            made[stored.id] = _caller(stored, snapshot, fixed, currency)
        caller = made[stored.id]
        if caller is not None:
            keys.append(Key(digest, caller, expires_ns))
    return keys


def _caller(stored: StoredKey, snapshot: Snapshot, fixed: Rules, currency: str) -> Caller | None:
    """Return what a stored key means; ``None`` while its tenant or team is disabled."""
    tenant, team = snapshot.tenants.get(stored.tenant), snapshot.teams.get((stored.tenant, stored.team))
    if (tenant is not None and tenant.disabled) or (team is not None and team.disabled):
        return None
    identity = Identity(tenant=stored.tenant, team=stored.team, key_id=stored.id)
    lists = [stored.models, None if team is None else team.models, None if tenant is None else tenant.models]
    return with_stored(
        Caller(
            identity,
            is_salted=True,
            models=allowed(lists),
            rights=rights_of(stored.roles),
            limits=limits_of(identity, fixed),
            shows=None if stored.shows is None else frozenset(stored.shows),
            repairs=stored.repairs,
        ),
        snapshot,
        currency,
    )


def with_stored(caller: Caller, snapshot: Snapshot, currency: str) -> Caller:
    """Return the caller with the aliases and limits that the store holds for it."""
    aliases: dict[str, str] = {}
    rules, budgets = list(caller.limits), list[Budget]()
    for subject in subjects_of(caller.identity):
        aliases = {**snapshot.aliases.get(subject, {}), **aliases}
        for limit in snapshot.limits.get(subject, ()):
            if limit.kind is LimitKind.MONEY:
                budgets.append(budget_of(limit, currency))
            else:
                rules.append(LimitRule(subject.level, subject.name, Resource(limit.kind.value), limit.amount,
                                       limit.on_outage))  # fmt: skip
    if not aliases and not budgets and len(rules) == len(caller.limits):
        return caller
    return Caller(
        caller.identity,
        caller.is_salted,
        caller.models,
        caller.rights,
        {**aliases, **caller.aliases},
        tightest(rules),
        tuple(budgets),
        caller.shows,
        caller.repairs,
    )


def allowed(lists: Iterable[Sequence[str] | None]) -> frozenset[str] | None:
    """Return the models that every list allows; ``None`` where no list says anything."""
    said = [frozenset(models) for models in lists if models is not None]
    return frozenset.intersection(*said) if said else None


def limits_of(identity: Identity, fixed: Rules) -> tuple[LimitRule, ...]:
    """Return the rules of the settings that hold for a caller."""
    return tightest(rule for subject in subjects_of(identity) for rule in fixed.get(subject, ()))


def tightest(rules: Iterable[LimitRule]) -> tuple[LimitRule, ...]:
    """Return one rule for each count: the smallest, where settings and store both have one."""
    by_counter: dict[str, LimitRule] = {}
    for rule in rules:
        known = by_counter.get(rule.counter)
        if known is None or rule.amount < known.amount:
            by_counter[rule.counter] = rule
    return tuple(by_counter.values())


def budget_of(limit: StoredLimit, currency: str) -> Budget:
    """Return a stored limit of money as a budget."""
    subject = limit.subject
    if subject.level is Level.TEAM:
        tenant, _, team = subject.name.partition("/")
        only: tuple[tuple[str, str], ...] = (("tenant", tenant), ("team", team))
    else:
        only = ((_SUBJECT[subject.level], subject.name),)
    return Budget(
        name=f"{limit.period.value} of {subject.level.value} {subject.name}",
        unit=Unit.MONEY,
        limit=limit.amount,
        window=Window(limit.period.value),
        only=only,
        currency=currency,
        on_outage=Policy.ADMIT if limit.on_outage is Outage.ADMIT else Policy.DENY,
    )


def stored_budgets(snapshot: Snapshot, currency: str) -> list[Budget]:
    """Return every limit of money in the store."""
    return [
        budget_of(limit, currency)
        for limits in snapshot.limits.values()
        for limit in limits
        if limit.kind is LimitKind.MONEY
    ]
