"""Nothing leaves the operator's own network unless an instance's entry allows it."""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter.base import InstanceFacts
from gateway.assembly import instance_spec, rates
from gateway.fleet import Fleet
from gateway.network import is_own
from gateway.settings import Settings
from radix_index.index import RadixIndex


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://10.1.2.3:8000", True),
        ("http://[fd00::1]:8000", True),
        ("http://gpu-7:8000", True),
        ("http://vllm.team.svc:8000", True),
        ("http://vllm.team.svc.cluster.local.:8000", True),
        ("https://api.openai.com", False),
        ("https://8.8.8.8", False),
        ("https://[2001:4860:4860::8888]", False),
    ],
)
def test_addresses(url: str, own: bool) -> None:
    assert is_own(url) is own


def _fleet(*entries: dict[str, Any]) -> Fleet:
    settings = Settings.model_validate({"instances": [{"adapter": "openai", **entry} for entry in entries]})
    specs = [instance_spec(each) for each in settings.instances]
    return Fleet(specs, client=None, index=RadixIndex(), rates=rates(settings))  # type: ignore[arg-type]


def _serving(fleet: Fleet, model: str) -> list[str]:
    return [instance.id for instance in fleet.serving(model)]


_VENDOR = {"id": "vendor", "url": "https://api.vendor.com", "models": ["m", "theirs"]}


def test_a_vendor_gets_only_what_nobody_inside_serves() -> None:
    fleet = _fleet({"id": "own", "url": "http://10.0.0.1", "models": ["m"]}, _VENDOR)
    assert _serving(fleet, "m") == ["own"]
    assert _serving(fleet, "theirs") == ["vendor"]


def test_nothing_goes_out_while_an_instance_has_not_said_what_it_serves() -> None:
    fleet = _fleet({"id": "own", "url": "http://10.0.0.1"}, _VENDOR)
    assert _serving(fleet, "m") == _serving(fleet, "theirs") == []
    fleet.instances["own"].facts = InstanceFacts(models=("m",))
    assert (_serving(fleet, "m"), _serving(fleet, "theirs")) == (["own"], ["vendor"])


def test_an_entry_can_allow_it_or_say_where_it_is() -> None:
    own = {"id": "own", "url": "http://10.0.0.1", "models": ["m"]}
    assert _serving(_fleet(own, {**_VENDOR, "takes_over": True}), "m") == ["own", "vendor"]
    assert _serving(_fleet(own, {**_VENDOR, "network": "own"}), "m") == ["own", "vendor"]
    assert _serving(_fleet({**own, "network": "outside"}, _VENDOR), "m") == ["own", "vendor"]
