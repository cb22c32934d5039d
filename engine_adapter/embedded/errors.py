"""The errors of the embedded engine.

EngineError
├── RequestError      the request can never be served: empty, too long, an id outside the vocabulary, a duplicate id
├── ConstraintError   a grammar that cannot go on: its sequence ends with an error, nobody else's
├── ModelError        a model folder that cannot be loaded: not a supported architecture, tensors missing
└── WeightsError      the weights cannot be had: no package, no hub, a checksum that does not match
"""

from __future__ import annotations


class EngineError(Exception):
    """The root of every error that the embedded engine raises on purpose."""


class RequestError(EngineError):
    """The client's mistake; nothing was queued. ``param`` names the field it is about."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConstraintError(EngineError):
    """A grammar's parser reached a limit, or was given a token that it does not allow."""


class ModelError(EngineError):
    """The model folder is not one that this engine can run."""


class WeightsError(EngineError):
    """The weights could not be fetched or do not verify."""
