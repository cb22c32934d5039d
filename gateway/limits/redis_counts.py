"""Counts in Redis or Valkey: for gateways on several machines. One script, one round trip a request, often shared.

Requests that come together go in one pipeline over one connection, each a script of its own that counts everything or
nothing. The window is that of the server's clock, so that gateways whose clocks differ still share one. Requests at
once are kept by replica; a replica that says nothing for ``ALIVE_S`` is taken for dead, and its requests for ended.

A server that does not answer within the deadline is away: whoever waits is told so then, everybody else at once, until
a ping in the background is answered. Nobody knows then which of the last calls were heard, and what ended meanwhile was
told to nobody: so a replica comes back under a new name, with the requests that it really has under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from gateway.limits.rules import WINDOW_S, CountsUnavailable, Resource, Take, Taken, Verdict

_log = logging.getLogger(__name__)

ALIVE_S = 30
_PREFIX = "{keepwarm-limits}"  # one hash slot, so that a script may touch all of it in a cluster
_BATCH = 256
_PING_S = 0.25
_FLUSH_S = 2.0

#: Keys: counts. Arguments: replica, window (s), then for each count kind (c: at once, w: in a window), amount, limit.
#: Answers {1, window's start, count …} or {0, place of the first without room, window's start, its count}.
_RESERVE = f"""
local now = tonumber(redis.call('TIME')[1])
local start = now - now % tonumber(ARGV[2])
local used = {{}}
for i = 1, #KEYS do
  local kind, amount, limit = ARGV[3 * i], tonumber(ARGV[3 * i + 1]), tonumber(ARGV[3 * i + 2])
  local count = 0
  if kind == 'c' then
    local owners = redis.call('HGETALL', KEYS[i])
    for j = 1, #owners, 2 do
      if owners[j] == ARGV[1] or redis.call('EXISTS', '{_PREFIX}:alive:' .. owners[j]) == 1 then
        count = count + tonumber(owners[j + 1])
      else
        redis.call('HDEL', KEYS[i], owners[j])
      end
    end
  else
    local known = redis.call('HMGET', KEYS[i], 'start', 'used')
    if tonumber(known[1] or '-1') == start then count = tonumber(known[2]) end
  end
  if count + amount > limit then return {{0, i, start, count}} end
  used[i] = count
end
local answer = {{1, start}}
for i = 1, #KEYS do
  local amount = tonumber(ARGV[3 * i + 1])
  answer[i + 2] = used[i] + amount
  if ARGV[3 * i] == 'c' then
    redis.call('HINCRBY', KEYS[i], ARGV[1], amount)
    redis.call('EXPIRE', KEYS[i], 86400)
  else
    redis.call('HSET', KEYS[i], 'start', start, 'used', used[i] + amount)
    redis.call('EXPIRE', KEYS[i], 2 * tonumber(ARGV[2]))
  end
end
return answer
"""
#: Key: a count of requests at once. Arguments: replica, its count.
_RESTATE = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], 86400)
return 1
"""
#: Keys: counts. Arguments: replica, then for each count kind, change, window's start.
_SETTLE = """
for i = 1, #KEYS do
  local kind, change, start = ARGV[3 * i - 1], tonumber(ARGV[3 * i]), ARGV[3 * i + 1]
  if kind == 'c' then
    if redis.call('HINCRBY', KEYS[i], ARGV[1], change) <= 0 then redis.call('HDEL', KEYS[i], ARGV[1]) end
  elseif redis.call('HGET', KEYS[i], 'start') == start then
    if redis.call('HINCRBY', KEYS[i], 'used', change) < 0 then redis.call('HSET', KEYS[i], 'used', 0) end
  end
end
return 1
"""
_SCRIPTS = (_RESERVE, _SETTLE, _RESTATE)


@dataclass(slots=True)
class _Call:
    """One script to run; without ``answer`` nobody waits."""

    script: str
    keys: list[str]
    arguments: list[str | int]
    answer: asyncio.Future[list[Any]] | None = None


@dataclass(slots=True)
class CountsStatus:
    """Counters since the start."""

    round_trips: int = 0
    calls: int = 0
    outages: int = 0
    lost_settlements: int = 0


@dataclass(slots=True)
class _Queue:
    calls: deque[_Call] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)


class RedisCounts:
    """The store. One event loop's; ``open`` starts the two tasks that it works by, ``close`` ends them."""

    def __init__(self, url: str, *, deadline_s: float = 0.1, window_s: int = WINDOW_S) -> None:
        self._redis = Redis.from_url(
            url, socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0), max_connections=2
        )
        self._deadline_s, self._window_s = deadline_s, window_s
        self._replica = secrets.token_hex(8)
        self._queue = _Queue()
        self._under_way: Counter[str] = Counter()  # of this replica, by the key of the count
        self._is_away = self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._digests: dict[str, str] = {}
        self.status = CountsStatus()

    async def open(self) -> None:
        """Begin; a server that is away is met by the first request."""
        self._tasks = [
            asyncio.create_task(self._send(), name="limit counts"),
            asyncio.create_task(self._live(), name="limit counts: alive"),
        ]

    async def reserve(self, takes: Sequence[Take]) -> Verdict:
        """See ``gateway.limits.rules.CountStore``."""
        if self._is_away:
            raise CountsUnavailable("the server of the counts is away")
        arguments: list[str | int] = [self._replica, self._window_s]
        for take in takes:
            arguments += [_kind(take), take.amount, take.rule.amount]
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._put(_Call(_RESERVE, [_key(take) for take in takes], arguments, answer))
        try:
            told = await answer
        except asyncio.CancelledError:
            answer.add_done_callback(lambda done: self._give_back(takes, done))
            raise
        return self._taken(takes, told)

    def _taken(self, takes: Sequence[Take], told: Sequence[int]) -> Verdict:
        """Return what the server says, and note what is under way from now on."""
        verdict = _verdict(takes, told)
        self._under_way.update(_key(one.take) for one in verdict.taken if _kind(one.take) == "c")
        return verdict

    def _give_back(self, takes: Sequence[Take], done: asyncio.Future[list[Any]]) -> None:
        """The client left while its request was being counted: nobody else will settle it."""
        if not done.cancelled() and done.exception() is None:
            taken = self._taken(takes, done.result()).taken
            self.settle(taken, [0] * len(taken))

    def settle(self, taken: Sequence[Taken], amounts: Sequence[int]) -> None:
        """See ``gateway.limits.rules.CountStore``."""
        for key in (_key(one.take) for one in taken if _kind(one.take) == "c"):
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]
        changes = [(one, amount - one.take.amount) for one, amount in zip(taken, amounts, strict=True)]
        changes = [(one, change) for one, change in changes if change]
        if not changes:
            return
        if self._is_away:
            self.status.lost_settlements += 1
            return
        arguments: list[str | int] = [self._replica]
        for one, change in changes:
            arguments += [_kind(one.take), change, one.start_ns // 10**9]
        self._put(_Call(_SETTLE, [_key(one.take) for one, _ in changes], arguments))

    async def close(self) -> None:
        """Write what was settled, within bounds, and close the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                while self._queue.calls and not self._is_away:
                    self._queue.emptied.clear()
                    await self._queue.emptied.wait()
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FLUSH_S)
        self._fail(CountsUnavailable("the gateway is going down"))
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                await self._redis.delete(_alive(self._replica))
        await self._redis.aclose()

    # --- the connection ---

    def _put(self, call: _Call) -> None:
        self._queue.calls.append(call)
        self._queue.filled.set()

    async def _send(self) -> None:
        """Send what has come together, one batch at a time, for ever."""
        queue = self._queue
        while not self._is_closed:
            await queue.filled.wait()
            batch = [queue.calls.popleft() for _ in range(min(len(queue.calls), _BATCH))]
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._run(batch)
            except (RedisError, OSError, TimeoutError) as error:
                self._fail(CountsUnavailable(f"the server of the counts is away: {type(error).__name__}"), batch)
                await self._until_back(error)
            if not queue.calls:
                queue.filled.clear()
                queue.emptied.set()

    async def _run(self, batch: Sequence[_Call]) -> None:
        """Run a batch's scripts in one round trip, or two where the server does not know them yet."""
        if not self._digests:
            for script in _SCRIPTS:
                self._digests[script] = await self._redis.script_load(script)
            await self._say_alive(self._replica)
        answers = await self._pipelined(batch)
        unknown = [call for call, answer in zip(batch, answers, strict=True) if isinstance(answer, NoScriptError)]
        if unknown:
            for script in _SCRIPTS:
                await self._redis.script_load(script)
            await self._say_alive(self._replica)
            again = dict(zip(map(id, unknown), await self._pipelined(unknown), strict=True))
            answers = [again.get(id(call), answer) for call, answer in zip(batch, answers, strict=True)]
        for call, answer in zip(batch, answers, strict=True):
            if call.answer is None or call.answer.done():
                continue
            if isinstance(answer, Exception):
                call.answer.set_exception(CountsUnavailable(f"the counts cannot be read: {answer}"))
            else:
                call.answer.set_result(answer)
        self.status.round_trips += 1
        self.status.calls += len(batch)

    async def _pipelined(self, batch: Sequence[_Call]) -> list[Any]:
        pipe = self._redis.pipeline(transaction=False)
        for call in batch:
            pipe.evalsha(self._digests[call.script], len(call.keys), *call.keys, *call.arguments)
        return list(await pipe.execute(raise_on_error=False))

    def _fail(self, error: CountsUnavailable, batch: Sequence[_Call] = ()) -> None:
        """Tell everybody who waits."""
        waiting, self._queue.calls = self._queue.calls, deque()
        for call in (*batch, *waiting):
            if call.answer is None:
                self.status.lost_settlements += 1
            elif not call.answer.done():
                call.answer.set_exception(error)

    async def _until_back(self, error: Exception) -> None:
        """Ping until there is an answer. Says both ends of the outage, a line each."""
        self._is_away = True
        self.status.outages += 1
        _log.error("limits cannot be counted and act by their policies: %s: %s", type(error).__name__, error)
        while not self._is_closed:  # the client may take a cancellation for a timeout of its own
            await asyncio.sleep(_PING_S)
            former, replica = self._replica, secrets.token_hex(8)
            try:
                async with asyncio.timeout(self._deadline_s):
                    await self._say_alive(replica)
                    await self._redis.delete(_alive(former))
            except (RedisError, OSError, TimeoutError):
                continue
            self._replica, self._is_away = replica, False
            for key, count in self._under_way.items():
                self._put(_Call(_RESTATE, [key], [replica, count]))
            _log.warning("limits are counted again")
            return

    async def _live(self) -> None:
        """Say now and then that this replica lives."""
        while not self._is_closed:
            await asyncio.sleep(ALIVE_S / 3)
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._deadline_s):
                    await self._say_alive(self._replica)

    async def _say_alive(self, replica: str) -> None:
        await self._redis.set(_alive(replica), 1, ex=ALIVE_S)


def _alive(replica: str) -> str:
    return f"{_PREFIX}:alive:{replica}"


def _verdict(takes: Sequence[Take], told: Sequence[int]) -> Verdict:
    if not told[0]:
        take = takes[told[1] - 1]
        return Verdict((), full=Taken(take, _start(take, told[2]), told[3]))
    return Verdict([Taken(take, _start(take, told[1]), used) for take, used in zip(takes, told[2:], strict=True)])


def _start(take: Take, start_s: int) -> int:
    return 0 if take.rule.resource is Resource.CONCURRENCY else start_s * 10**9


def _kind(take: Take) -> str:
    return "c" if take.rule.resource is Resource.CONCURRENCY else "w"


def _key(take: Take) -> str:
    return f"{_PREFIX}:{take.rule.counter}"
