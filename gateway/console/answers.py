"""What the console's handlers share: strict headers, pages, downloads, and the words of addresses read back."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Final

from aiohttp import web

from gateway.access.roles import Right
from gateway.console.exports import CONTENT_TYPES, Rows, export
from gateway.console.frame import render
from gateway.console.visitor import Visitor

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self'; script-src 'self'; img-src 'self';"
    " connect-src 'self'; object-src 'none'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_COMPRESSED_HERE: Final = 16 << 10
"""Bytes that the event loop compresses itself; longer pages are compressed in a thread."""
_NANO: Final = 10**9


def page(html: str, status: int = 200) -> web.Response:
    """A page, compressed."""
    response = web.Response(
        text=html,
        status=status,
        content_type="text/html",
        charset="utf-8",
        headers=HEADERS,
        zlib_executor_size=_COMPRESSED_HERE,
    )
    response.enable_compression()
    return response


def missing(visitor: Visitor, what: str) -> web.Response:
    """What is shown where nothing is found."""
    return page(render("missing.html", visitor, what=what), 404)


def away(visitor: Visitor, what: str) -> web.Response:
    """What is shown where a database can't be reached."""
    return page(render("away.html", visitor, what=what), 503)


def forbidden(visitor: Visitor, right: Right) -> web.Response:
    """What is shown to a key that may not see a page."""
    return page(render("forbidden.html", visitor, right=right.value.replace("_", " ")), 403)


def download(rows: Rows, form: str, name: str) -> web.Response:
    """What a page shows, as a file of :data:`gateway.console.exports.CONTENT_TYPES`."""
    response = web.Response(
        text=export(rows, form),
        content_type=CONTENT_TYPES[form],
        charset="utf-8",
        headers=HEADERS | {"Content-Disposition": f'attachment; filename="{name}.{form}"'},
        zlib_executor_size=_COMPRESSED_HERE,
    )
    response.enable_compression()
    return response


def form_of(request: web.Request) -> str | None:
    """The form of a download that is asked for, ``None`` for the page."""
    form = request.query.get("form")
    return form if form in CONTENT_TYPES else None


def whole_number(text: str | None) -> int | None:
    """A number below 2**63 as SQLite takes it, ``None`` for anything else."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19:
        return None
    return number if (number := int(text)) < 2**63 else None


def nano_units(text: str) -> int | None:
    """An amount of money in nano-units, ``None`` for anything else than a plain number."""
    try:
        amount = Decimal(text)
    except InvalidOperation:
        return None
    if not amount.is_finite() or not 0 <= amount < 10**9:
        return None
    return int(amount * _NANO)


def percentage(text: str) -> float | None:
    """A number from 0 to 100, ``None`` for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= 100 else None
