"""Budget counts in Redis or Valkey: for a fleet of gateways.

A Lua script reserves in all counts or in none. The store holds a *generation*; a process that finds another one, or
none, than it knows has met a store that forgot what it had counted. It writes down between which instants that was, and
from then on every process answers ``BudgetStoreError`` for the windows in which it may have happened, so that budgets
act by their policy to the end of them. A store that is new to everybody is begun with what the ledger says (``seeds``).

Use a server that evicts nothing (``maxmemory-policy noeviction``) and, where a budget shall outlive it, that persists.
Counts are exact up to 2**53 (nine million units of currency, in nano-units), where Lua's numbers end.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from billing.budgets import Hold, Seed, Settled
from billing.errors import BudgetStoreError

_PREFIX = "{keepwarm-budgets}"  # one hash slot, so that a script may touch all of it in a cluster
_GENERATION, _FORGOT = f"{_PREFIX}:generation", f"{_PREFIX}:forgot"
#: Counts are kept this long after their window.
_KEEP_MS = 3_600_000
#: After a failure nobody asks, but for a ping in the background, this often.
_PING_S = 0.2

_HELD, _FULL, _STRANGER, _FORGOTTEN = range(4)
#: Keys: generation, forgot, counts. Arguments: generation, then for each count amount, limit, ms to keep, hard, window
#: (ms). Answers one of the four words above with the places of the counts that it is about.
_RESERVE = f"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {{{_STRANGER}}} end
local function of(i, n) return ARGV[2 + (i - 3) * 6 + n] end
local forgot = redis.call('HMGET', KEYS[2], 'first', 'last')
if forgot[1] then
  local answer = {{{_FORGOTTEN}}}
  for i = 3, #KEYS do
    if tonumber(of(i, 4)) <= tonumber(forgot[2]) and tonumber(of(i, 5)) > tonumber(forgot[1]) then
      answer[#answer + 1] = i - 3
    end
  end
  if #answer > 1 then return answer end
end
for i = 3, #KEYS do
  local used = tonumber(redis.call('HGET', KEYS[i], 'used') or '0')
  if of(i, 3) == '1' and used + tonumber(of(i, 0)) > tonumber(of(i, 1)) then return {{{_FULL}, i - 3}} end
end
for i = 3, #KEYS do
  redis.call('HINCRBY', KEYS[i], 'used', of(i, 0))
  redis.call('PEXPIRE', KEYS[i], of(i, 2))
end
return {{{_HELD}}}
"""
_SETTLE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
local out = {}
for i = 2, #KEYS do
  local at = 2 + (i - 2) * 3
  local used, reached = 0, 0
  if redis.call('EXISTS', KEYS[i]) == 1 then
    used = redis.call('HINCRBY', KEYS[i], 'used', ARGV[at])
    for percent in string.gmatch(ARGV[at + 2], '%d+') do
      local share = tonumber(percent)
      if 100 * used >= share * tonumber(ARGV[at + 1]) then reached = math.max(reached, share) end
    end
    if reached > tonumber(redis.call('HGET', KEYS[i], 'alerted') or '0') then
      redis.call('HSET', KEYS[i], 'alerted', reached)
    else
      reached = 0
    end
  end
  out[#out + 1] = used
  out[#out + 1] = reached
end
return out
"""

#: Connections of a process; more requests than that wait for one, and no longer once the store is away.
_CONNECTIONS = 8

#: Widens what is written down of when the store forgot.
_FORGET = """
local first, last = unpack(redis.call('HMGET', KEYS[1], 'first', 'last'))
if not first or tonumber(ARGV[1]) < tonumber(first) then redis.call('HSET', KEYS[1], 'first', ARGV[1]) end
if not last or tonumber(ARGV[2]) > tonumber(last) then redis.call('HSET', KEYS[1], 'last', ARGV[2]) end
"""

Seeds = Callable[[], Sequence[Seed]]


class RedisBudgetStore:
    """The store. ``seeds`` is asked when the store turns out to be empty."""

    def __init__(self, url: str, *, timeout_s: float = 0.25, seeds: Seeds = tuple) -> None:
        """``timeout_s``: a server that is silent for so long is away. That is waited for once, not by every request."""
        self._redis = Redis.from_url(
            url, max_connections=_CONNECTIONS + 2, socket_timeout=timeout_s, socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )  # fmt: skip
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._seeds = seeds
        self._reserve_script = self._redis.register_script(_RESERVE)
        self._settle_script = self._redis.register_script(_SETTLE)
        self._forgot_script = self._redis.register_script(_FORGET)
        self._generation: bytes | None = None
        self._asked_ns: int | None = None  # the latest arrival that the store answered for
        self._pinging: asyncio.Task[None] | None = None  # while the store is away
        self._is_closed = False

    async def open(self, at_ns: int) -> None:
        """Learn the store's generation now, so that it is noticed when the store forgets. Raises ``BudgetStoreError``.

        A process that has never asked cannot know that something is missing.
        """
        try:
            await self._join(at_ns)
        except (RedisError, OSError) as error:
            raise BudgetStoreError(f"{type(error).__name__}: {error}") from error

    async def reserve(self, holds: Sequence[Hold], at_ns: int) -> Hold | None:
        """See ``billing.budgets.BudgetStore``."""
        async with self._slot():
            word, places = await self._ask(holds, at_ns)
            if word == _STRANGER:
                await self._join(at_ns)
                word, places = await self._ask(holds, at_ns)
        if word == _STRANGER:
            raise BudgetStoreError("the store forgets faster than it is asked")
        self._asked_ns = max(at_ns, self._asked_ns or at_ns)
        if word == _FORGOTTEN:
            concerned = frozenset(holds[place].counter for place in places)
            raise BudgetStoreError("the store forgot what it had counted in this window", concerned)
        return holds[places[0]] if word == _FULL else None

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Have one of the connections, once there is one. Raises ``BudgetStoreError``, at once while it is away."""
        async with self._slots:
            if self._pinging is not None:
                raise BudgetStoreError("the store is away")
            try:
                yield
            except (RedisError, OSError) as error:
                if self._pinging is None:
                    self._pinging = asyncio.create_task(self._until_back(), name="budget store")
                raise BudgetStoreError(f"{type(error).__name__}: {error}") from error

    async def _until_back(self) -> None:
        while not self._is_closed:  # the client may take a cancellation for a timeout of its own
            await asyncio.sleep(_PING_S)
            try:
                await self._redis.ping()
                break
            except (RedisError, OSError):
                continue
        self._pinging = None

    async def _ask(self, holds: Sequence[Hold], at_ns: int) -> tuple[int, list[int]]:
        if self._generation is None:
            await self._join(at_ns)
        arguments: list[bytes | int] = [self._generation or b""]
        for hold in holds:
            start_ms, end_ms = hold.start_ns // 10**6, hold.end_ns // 10**6
            kept_ms = end_ms - at_ns // 10**6 + _KEEP_MS
            arguments += [hold.amount, hold.budget.limit, kept_ms, int(hold.budget.hard), start_ms, end_ms]
        keys = [_GENERATION, _FORGOT, *(_key(hold) for hold in holds)]
        word, *places = await self._reserve_script(keys=keys, args=arguments)
        return int(word), [int(place) for place in places]

    async def settle(self, holds: Sequence[Hold], amounts: Sequence[int]) -> list[Settled]:
        """See ``billing.budgets.BudgetStore``."""
        arguments: list[bytes | int | str] = [self._generation or b""]
        for hold, amount in zip(holds, amounts, strict=True):
            arguments += [amount - hold.amount, hold.budget.limit, ",".join(map(str, hold.budget.alerts))]
        async with self._slot():
            answer = await self._settle_script(keys=[_GENERATION, *(_key(hold) for hold in holds)], args=arguments)
        if answer is None:
            raise BudgetStoreError("the store forgot what was reserved")
        return [
            Settled(int(used), int(percent) or None) for used, percent in zip(answer[::2], answer[1::2], strict=True)
        ]

    async def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        if self._pinging is not None:
            self._pinging.cancel()
        await self._redis.aclose()

    async def _join(self, at_ns: int) -> None:
        """Learn the store's generation. One that is empty is begun; one that lost ours has forgotten."""
        if self._generation is not None:
            at_ms, asked_ms = at_ns // 10**6, (self._asked_ns or at_ns) // 10**6
            await self._forgot_script(keys=[_FORGOT], args=[min(asked_ms, at_ms), max(asked_ms, at_ms)])
        if await self._redis.get(_GENERATION) is None:
            for seed in self._seeds():
                key = f"{_PREFIX}:{seed.start_ns}:{seed.counter}"
                await self._redis.hsetnx(key, "used", str(seed.used))
                await self._redis.pexpire(key, (seed.end_ns - at_ns) // 10**6 + _KEEP_MS)
            await self._redis.set(_GENERATION, secrets.token_hex(8), nx=True)
        generation = await self._redis.get(_GENERATION)
        self._generation = generation if isinstance(generation, bytes) else None


def _key(hold: Hold) -> str:
    return f"{_PREFIX}:{hold.start_ns}:{hold.counter}"
