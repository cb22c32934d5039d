"""Roles, and the rights that they give. A key has one role or several; rights are what the gateway asks about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Right(StrEnum):
    """Something that a caller may do."""

    INFER = "infer"  # use models: completions, embeddings, token endpoints, stored responses
    SEE_RUNS = "see_runs"  # traces and runs of its own tenant
    SEE_COSTS = "see_costs"  # what its own tenant spent and saved
    ADMINISTER = "administer"  # instances, keys, limits, audit log; runs and costs of every tenant


class Role(StrEnum):
    """What a key is for."""

    USER = "user"
    VIEWER = "viewer"
    FINANCE = "finance"
    ADMIN = "admin"


RIGHTS: Mapping[Role, frozenset[Right]] = {
    Role.USER: frozenset({Right.INFER, Right.SEE_RUNS}),
    Role.VIEWER: frozenset({Right.SEE_RUNS}),
    Role.FINANCE: frozenset({Right.SEE_COSTS}),
    Role.ADMIN: frozenset(Right),
}
ALL_RIGHTS = frozenset(Right)


def rights_of(roles: Iterable[Role]) -> frozenset[Right]:
    """Return everything that one of the roles allows."""
    return frozenset().union(*(RIGHTS[role] for role in roles))
