"""What can go wrong between the gateway and an engine.

UpstreamError            an engine, or something in its place, could not be used
├── ConnectFailed        no connection: nothing was sent, so the request may go elsewhere
├── UpstreamBroken       the connection ended or stayed silent after something may have been sent
└── AnswerTooLong        an answer over the limit
LaunchError              an embedded engine did not start, or ended before it was healthy

Errors of prompts (``engine_adapter.prompt``), of event frames (``engine_adapter.wire_events``) and of the embedded
engine (``engine_adapter.embedded.errors``) stand beside what raises them. Messages quote no prompts, answers or keys.
"""

from __future__ import annotations


class UpstreamError(Exception):
    """An engine could not be used."""


class ConnectFailed(UpstreamError):
    """No connection: nothing was sent."""


class UpstreamBroken(UpstreamError):
    """The connection ended or stayed silent after the request may have been sent."""


class AnswerTooLong(UpstreamError):
    """The answer is over the limit."""


class LaunchError(Exception):
    """An embedded engine did not start."""
