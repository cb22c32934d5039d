"""What an operator of any engine may write: where pages go, within which limits, for how long and how much of whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from kvstore.deadline import Allowance
from kvstore.page import Namespace
from kvstore.retention import Retention, RetentionRules
from kvstore.worth import WorthOptions

GB = 1_000_000_000


class SaltRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What holds for the pages of one salt. What is not given is as for all others; ``None`` is without limit."""

    ttl_s: float | msgspec.UnsetType | None = msgspec.UNSET
    quota_gb: float | msgspec.UnsetType | None = msgspec.UNSET


class StoreOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the plug-ins have in common. Sizes are of the whole server: its ranks share them evenly."""

    disk: str | None = None  # a folder
    disk_gb: float = 0.0
    pool: str | None = None  # a URL; see kvstore.tiers.pool_url
    pool_gb: float = 64.0  # what this server puts there; the pool's own maxmemory bounds all together
    host_socket: str | None = None  # of `keepwarm store serve-host`: memory in common with this machine's servers
    ttl_s: float | None = None  # how long a page lives from when it is stored
    quota_gb: float | None = None  # of one salt's pages in each tier
    by_salt: dict[str, SaltRule] = {}  # others for some; "" is for pages without a salt
    namespace: str = ""  # servers share pages only within one
    weights_id: str | None = None  # else the digest of the model's files
    prefill_tokens_per_s: float | None = None  # else learned
    claim_margin: float = 1.0  # how many times as long computing must take for a page to be claimed
    deadline_ms: float = 100.0  # of one call, besides what its bytes take
    least_mb_per_s: float = 100.0  # a medium slower than this is late
    announce_pages: int = 100_000  # of each tier, told after a start

    @property
    def disk_bytes(self) -> int:
        """See ``disk_gb``."""
        return int(self.disk_gb * GB) if self.disk is not None else 0

    @property
    def pool_bytes(self) -> int:
        """See ``pool_gb``."""
        return int(self.pool_gb * GB) if self.pool is not None else 0

    @property
    def disk_path(self) -> Path | None:
        """See ``disk``."""
        return None if self.disk is None else Path(self.disk).expanduser()

    @property
    def host_path(self) -> Path | None:
        """See ``host_socket``."""
        return None if self.host_socket is None else Path(self.host_socket).expanduser()

    @property
    def allowance(self) -> Allowance:
        """How long one call may take."""
        return Allowance(self.deadline_ms / 1000, int(self.least_mb_per_s * 1_000_000))

    @property
    def worth(self) -> WorthOptions:
        """What decides whether a page is fetched."""
        return WorthOptions(
            prefill_tokens_per_s=self.prefill_tokens_per_s, margin=self.claim_margin, allowed=self.allowance
        )

    def retention(self, share: float = 1.0) -> RetentionRules:
        """Return what one tier keeps for how long; ``share``: of the quotas, that of one rank or pool."""
        default = _rule(self.ttl_s, self.quota_gb, share)
        some = {
            Namespace(salt or None): _rule(
                self.ttl_s if rule.ttl_s is msgspec.UNSET else rule.ttl_s,
                self.quota_gb if rule.quota_gb is msgspec.UNSET else rule.quota_gb,
                share,
            )
            for salt, rule in self.by_salt.items()
        }
        return RetentionRules(default, some)


OptionsT = TypeVar("OptionsT", bound=StoreOptions)


def read_store_options(kind: type[OptionsT], given: Mapping[str, object], where: str) -> OptionsT:
    """Return the options given at ``where``. Raises ``ValueError`` that says what is wrong with them."""
    try:
        options = msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"keepwarm's options in {where}: {error}") from error
    if options.disk is not None and options.disk_gb <= 0:
        raise ValueError("keepwarm: 'disk' needs 'disk_gb', the size that the folder may have")
    quotas = [options.quota_gb, *(rule.quota_gb for rule in options.by_salt.values())]
    sizes = [options.pool_gb, options.deadline_ms, *(quota for quota in quotas if isinstance(quota, float))]
    if min(sizes) < 0 or options.least_mb_per_s <= 0:
        raise ValueError("keepwarm: sizes and times cannot be negative")
    if options.claim_margin <= 0 or (options.prefill_tokens_per_s or 1.0) <= 0:
        raise ValueError("keepwarm: 'claim_margin' and 'prefill_tokens_per_s' must be positive")
    lives = [options.ttl_s, *(rule.ttl_s for rule in options.by_salt.values())]
    if any(isinstance(ttl_s, float) and ttl_s <= 0 for ttl_s in lives):
        raise ValueError("keepwarm: 'ttl_s' must be positive; leave it out, or write null, for pages without an end")
    return options


def _rule(ttl_s: float | None, quota_gb: float | None, share: float) -> Retention:
    return Retention(ttl_s, None if quota_gb is None else int(quota_gb * share * GB))
