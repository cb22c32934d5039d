"""Every kind of engine that the settings can name has an adapter, and says what it can do in one place."""

from __future__ import annotations

from typing import get_args

from engine_adapter.base import OPENAI_ENDPOINTS, LoadSignal
from engine_adapter.named import ADAPTERS
from gateway.assembly import adapter_of
from gateway.settings import Adapter


def test_settings_and_adapters_name_the_same_engines() -> None:
    assert set(get_args(Adapter)) == set(ADAPTERS)
    for name, adapter in ADAPTERS.items():
        assert adapter.name == name
        assert adapter_of(name) is adapter


def test_what_is_said_hangs_together() -> None:
    for adapter in ADAPTERS.values():
        able = adapter.capabilities
        assert able.endpoints & OPENAI_ENDPOINTS
        assert (able.load is LoadSignal.NONE) == (not adapter.load_paths)
        assert able.abort == (adapter.abort("a request") is not None)
        assert adapter.health_path.startswith("/")
        if able.output_ids:
            assert adapter.id_members
