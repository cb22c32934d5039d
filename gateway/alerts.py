"""Budget alerts to a webhook."""

from __future__ import annotations

import logging
from dataclasses import asdict

import aiohttp

from billing.budgets import Alert

_log = logging.getLogger(__name__)


class Webhook:
    """POSTs each alert as one JSON object. One that cannot be delivered is logged; the log has every alert anyway."""

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self._url, self._timeout = url, aiohttp.ClientTimeout(total=timeout_s)

    async def __call__(self, alert: Alert) -> None:
        """Send it."""
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.post(self._url, json={"type": "keepwarm.budget", **asdict(alert)}) as response,
            ):
                if response.status >= 300:
                    _log.error("the alert of budget %s was answered with %d", alert.budget, response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.error("the alert of budget %s could not be sent: %s", alert.budget, error)
