"""The frame of every page: the templates, the navigation of what a visitor may see, addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined

from gateway.access.roles import Right
from gateway.console.assets import asset_href
from gateway.console.formats import of
from gateway.console.visitor import Visitor


@dataclass(frozen=True, slots=True)
class Place:
    """A page that the navigation leads to."""

    name: str
    href: str
    label: str
    right: Right


PLACES: Final = (
    Place("overview", "/console", "Overview", Right.SEE_RUNS),
    Place("runs", "/console/runs", "Runs", Right.SEE_RUNS),
    Place("cost", "/console/cost", "Cost", Right.SEE_COSTS),
    Place("breaks", "/console/breaks", "Breaks", Right.SEE_RUNS),
    Place("prefixes", "/console/prefixes", "Prefixes", Right.SEE_RUNS),
    Place("whatif", "/console/what-if", "What-if", Right.SEE_RUNS),
    Place("instances", "/console/instances", "Instances", Right.ADMINISTER),
    Place("stores", "/console/stores", "Stores", Right.ADMINISTER),
    Place("index", "/console/index", "Index", Right.ADMINISTER),
    Place("settings", "/console/settings", "Settings", Right.ADMINISTER),
    Place("keys", "/console/keys", "Keys", Right.ADMINISTER),
)


def render(template: str, visitor: Visitor, **values: object) -> str:
    """Return a page as HTML, everything escaped."""
    places = [place for place in PLACES if visitor.may(place.right)]
    return environment().get_template(template).render(places=places, visitor=visitor, **values)


def partial(template: str, **values: object) -> str:
    """Return a piece of a page: what a live page puts in place of the former one."""
    return environment().get_template(template).render(**values)


def run_href(run_id: str, tenant: str, *, always: bool = False) -> str:
    """The address of a run's page; the tenant is named unless it is the default one, or ``always``."""
    address = f"/console/runs/{quote(run_id, safe='')}"
    return address if tenant == "default" and not always else f"{address}?{urlencode({'tenant': tenant})}"


def request_href(request_id: str) -> str:
    """The address of a request's page."""
    return f"/console/requests/{quote(request_id, safe='')}"


def query_href(address: str, **values: object) -> str:
    """An address with those values that say something; booleans as 1."""
    said = [(name, "1" if value is True else value) for name, value in values.items() if value not in (None, "", False)]
    return f"{address}?{urlencode(said)}" if said else address


@cache
def environment() -> Environment:
    """The templates."""
    made = Environment(
        loader=PackageLoader("gateway.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # they are packaged: to look whether they changed, for each piece of a page, costs more
    )
    made.globals |= {
        "asset": asset_href,
        "run_href": run_href,
        "request_href": request_href,
        "query_href": query_href,
        "of": of,
    }
    return made
