"""The console of a gateway: its sources put together of the gateway's own parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from billing.database import Place
from billing.ledger_read import LedgerReader, RowFilter
from billing.prices import PriceBook
from billing.reports import Report
from engine_adapter.errors import UpstreamError
from engine_adapter.http import UpstreamClient, get_bytes
from gateway.access.store import AccessStore
from gateway.console.key_desk import KeyDesk
from gateway.console.routes import Console
from gateway.console.sources import Sources
from gateway.console.visitor import visitor_of
from gateway.fleet import Fleet
from gateway.flights import Flights
from gateway.identity import KeyRing
from gateway.instance import Instance
from gateway.settings import Settings
from radix_index.index import RadixIndex
from tracing.store import TraceStore

_METRICS_TIMEOUT_S = 2.0


def mounted_console(
    settings: Settings,
    *,
    traces: TraceStore,
    place: Place,
    keys: KeyRing,
    key_store: AccessStore,
    keys_changed: Callable[[], Awaitable[object]],
    fleet: Fleet,
    index: RadixIndex,
    flights: Flights,
    client: UpstreamClient,
) -> Console:
    """Return it; whoever mounts it adds its routes and runs it."""

    async def metrics_of(instance: Instance) -> str | None:
        url, headers = f"{instance.spec.url}/metrics", instance.spec.headers
        try:
            body = await get_bytes(client, url, headers, timeout_s=_METRICS_TIMEOUT_S)
        except UpstreamError:
            return None
        return body.decode(errors="replace")

    def report_of(by: Sequence[str], where: RowFilter) -> Report:
        with LedgerReader(place) as reader:
            return reader.report(by, where)

    def books() -> dict[str, PriceBook]:
        with LedgerReader(place) as reader:
            return reader.price_books()

    fixed = tuple(key.id for key in settings.keys)
    return Console(
        Sources(
            traces=traces,
            visitor_of=lambda request: visitor_of(keys, request.headers),
            report_of=report_of,
            books=books,
            instances=lambda: list(fleet.instances.values()),
            index=index,
            underway=flights.underway,
            is_leaving=lambda: flights.is_leaving or flights.is_draining,
            metrics_of=metrics_of,
            settings=settings.model_dump(mode="json"),
            default_settings=type(settings).model_construct().model_dump(mode="json"),
            keys=KeyDesk(key_store, fixed, keys_changed),
        )
    )
