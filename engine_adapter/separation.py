"""Prefill and decode on different engines: what a request says so that one hands its pages to the other. Pure.

=========  =========================================================  ================================================
handover   how it goes                                                who does so
=========  =========================================================  ================================================
BOOTSTRAP  both engines get the request at once, with the prefilling  SGLang 0.5.23 (``--disaggregation-mode``)
           one's address and a room's number under which they meet
PARAMS     the prefilling one answers first, with one token and the   vLLM 0.32 (``kv_transfer_params`` of its NIXL,
           parameters with which the other one fetches its pages      Mooncake and MoRI-IO connectors)
=========  =========================================================  ================================================

Read in these versions' sources: no separated engine runs on a CPU.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from engine_adapter.base import Merge, mapping

_LIMITS = ("max_tokens", "max_completion_tokens")

Members = Mapping[str, object]


def bootstrap_members(url: str, port: int) -> dict[str, object]:
    """Return what both engines must get: ``url`` is the prefilling one's. The room is one of 2**63, by chance."""
    host = urlsplit(url).hostname or "127.0.0.1"
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(63)}


def prefill_members(body: Members) -> dict[str, object]:
    """Return what makes the request of ``body`` one for its prompt alone, answered at once and whole."""
    members: dict[str, object] = {"stream": False, "max_tokens": 1}
    members |= {name: 1 for name in _LIMITS if body.get(name) is not None}
    if body.get("min_tokens") is not None:
        members["min_tokens"] = 1
    if body.get("stream_options") is not None:
        members["stream_options"] = None
    return members


def transfer_request() -> Merge:
    """Return the ``kv_transfer_params`` that ask an engine to keep a prompt's pages for another one."""
    return Merge(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )


def transfer_answer(answer: Members) -> Merge | None:
    """Return the ``kv_transfer_params`` for the engine that decodes; ``None`` where the answer holds none."""
    told = mapping(answer.get("kv_transfer_params"))
    return Merge(told) if told else None


def merged(one: object, other: Merge) -> Merge:
    """Return both members' parts; ``other`` wins."""
    return Merge({**one.members, **other.members}) if isinstance(one, Merge) else other
