"""What a request passes before anything is done for it, opened from the settings: keys, limits, budgets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from billing.budgets import Budgets
from billing.shelf import PriceShelf
from gateway import assembly
from gateway.access.keeper import KeeperOptions, KeyKeeper
from gateway.access.store import AccessStore
from gateway.alerts import Webhook
from gateway.errors import SettingsError
from gateway.identity import KeyRing
from gateway.limits.limiter import Limiter
from gateway.limits.rules import CountsUnavailable
from gateway.settings import Settings, is_loopback
from gateway.spending import Spending

_log = logging.getLogger(__name__)
_FLUSH_S = 5.0


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a gateway: what requests are asked for, where they are stored, and what keeps the two in step."""

    ring: KeyRing
    store: AccessStore
    keeper: KeyKeeper


async def opened_keys(settings: Settings, shelf: PriceShelf, stack: AsyncExitStack) -> Keys:
    """Return the keys there are. Raises ``SettingsError`` where none is needed that is not there."""
    ring, store = assembly.key_ring(settings), assembly.access_store(settings)
    stack.push_async_callback(asyncio.to_thread, store.close)
    keeper = KeyKeeper(
        store,
        ring,
        fixed=assembly.fixed_keys(settings),
        rules=assembly.limit_rules(settings),
        currency=shelf.default.currency,
        options=KeeperOptions(settings.access.refresh_s, settings.access.stale_limit_s),
    )
    await keeper.refresh()
    if ring.is_open and not is_loopback(settings.server.host):
        raise SettingsError(
            f"server.host = {settings.server.host!r} listens beyond this machine, which needs a key:"
            " [[keys]], or 'keepwarm key create'"
        )
    return Keys(ring, store, keeper)


async def opened_spending(
    settings: Settings, shelf: PriceShelf, keeper: KeyKeeper, stack: AsyncExitStack, worker: int = 0
) -> Spending:
    """Return the limits and budgets of one worker. They are settled until the stack ends. Raises ``SettingsError``."""
    counts = assembly.count_store(settings, worker)
    try:
        await counts.open()
    except CountsUnavailable as error:
        raise SettingsError(str(error)) from None
    stack.push_async_callback(counts.close)
    listed = assembly.budgets_of(settings, shelf)
    store = await asyncio.to_thread(assembly.budget_store, settings, [*listed, *keeper.budgets()])
    stack.push_async_callback(store.close)
    webhook = settings.billing.alert_webhook
    budgets = Budgets(listed, store, None if webhook is None else Webhook(webhook))
    await budgets.open(time.time_ns())
    await stack.enter_async_context(_settling(budgets))
    return Spending(budgets, shelf, settings.billing.assumed_output_tokens, Limiter(counts))


@asynccontextmanager
async def _settling(budgets: Budgets) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(budgets.run(), name="budgets")
        try:
            yield
            async with asyncio.timeout(_FLUSH_S):
                await budgets.drain()
        except TimeoutError:
            _log.warning("budgets were not settled in time: what was reserved stands")
        finally:
            task.cancel()
