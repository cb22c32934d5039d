"""What the gateway answers when it does not answer with an engine's words.

GatewayError               a request ends with ``status`` and a class that the client and the record see
├── BadRequest             400: malformed JSON, not an object, a member of the wrong kind, an unknown role
│   ├── NotHere            no engine of the model has the endpoint
│   └── NoThreads          no engine of the model holds conversations
├── Unauthorized           401: no key, or one that is not known
├── Forbidden              403: the key may not use this model, or not this administration
├── NotFound               404: no such path, model, run or instance
├── MethodNotAllowed       405
├── BodyTooSlow            408: the body did not arrive in time
├── BodyTooLarge           413
├── UnsupportedEncoding    415: a compressed body
├── Conflict               409: what is to be made is there already, or is not as it was thought to be
├── ColdPrefix             412: the request asked for a warm prefix, and there is none that is warm enough
├── Misdirected            421: the request was meant for a host that is not served here
├── OverLimit              429: a limit of the key, its team or tenant has no room; ``retry_after_s``
├── OverBudget             429: a budget has no room, or cannot be judged; ``retry_after_s``
├── NoInstance             503: no healthy instance serves the model; ``retry_after_s``
├── Draining               503: the gateway is going down
├── KeysAway               503: the store of keys has been away for too long to trust what is known of it
├── LedgerFull             503: what a request costs cannot be written down now
├── LedgerAway             503: the ledger cannot be read now
└── UpstreamUnusable       502 or 504: engines were tried and none answered
    ├── UpstreamTimeout    an engine was silent for longer than it may be
    │   └── OverTime       an answer took longer than an answer may take
    └── EngineGaveUp       an engine ended its stream with an error of its own
SettingsError              the process does not start

Messages never quote a prompt, an answer or a key.
"""

from __future__ import annotations


class GatewayError(Exception):
    """A request ends here. ``kind`` is OpenAI's ``type``, ``code`` a short class for clients and records."""

    status = 500
    kind = "server_error"
    code = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s


class BadRequest(GatewayError):
    """The client's mistake."""

    status, kind, code = 400, "invalid_request_error", "invalid_request"


class NotHere(BadRequest):
    """No engine of the model has the endpoint, and none can stand in for it."""

    code = "endpoint_not_supported"

    def __init__(self, endpoint: str) -> None:
        super().__init__(f"no engine of this model has {endpoint}", param="model")


class NoThreads(BadRequest):
    """No engine of the model holds conversations between requests. Official clients know the code, and send the whole
    conversation then."""

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__("thread: engines behind this gateway hold no conversations", param="thread")


class Unauthorized(GatewayError):
    """No valid key."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(GatewayError):
    """The key is valid and does not allow this."""

    status, kind, code = 403, "permission_error", "not_allowed"


class NotFound(GatewayError):
    """There is no such thing."""

    status, kind, code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(GatewayError):
    """The path exists, the method does not."""

    status, kind, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooSlow(GatewayError):
    """The body did not arrive in time. Official clients send it again by themselves: the network may have been slow."""

    status, kind, code = 408, "invalid_request_error", "body_timeout"


class BodyTooLarge(GatewayError):
    """The body is over the cap; it was neither read to its end nor cut short."""

    status, kind, code = 413, "invalid_request_error", "body_too_large"


class UnsupportedEncoding(GatewayError):
    """The body is compressed: a megabyte of it may be a gigabyte, and engines get the client's bytes as they are."""

    status, kind, code = 415, "invalid_request_error", "unsupported_encoding"


class Conflict(GatewayError):
    """What is to be made is there already, or what is to be changed is not as it was thought to be."""

    status, kind, code = 409, "conflict_error", "conflict"


class ColdPrefix(GatewayError):
    """No instance is warm enough for what the request demands. (Not 409, which official clients send again.)"""

    status, kind, code = 412, "invalid_request_error", "prefix_cold"


class Misdirected(GatewayError):
    """The request was meant for another host."""

    status, kind, code = 421, "invalid_request_error", "misdirected_request"


class OverLimit(GatewayError):
    """A limit has no room now, or cannot be judged and denies by its policy."""

    status, kind, code = 429, "rate_limit_error", "rate_limit_exceeded"


class TooBusy(GatewayError):
    """The request's turn did not come, or would not: too many wait."""

    status, kind, code = 429, "rate_limit_error", "overloaded"


class KeysAway(GatewayError):
    """The store of keys cannot be reached, and has not been for longer than it may."""

    status, kind, code = 503, "server_error", "keys_unavailable"


class OverBudget(GatewayError):
    """A budget has no room for the request, or cannot be judged and denies by its policy."""

    status, kind, code = 429, "insufficient_quota", "budget_exceeded"


class NoInstance(GatewayError):
    """No healthy instance serves the model now."""

    status, kind, code = 503, "server_error", "no_instance"


class Draining(GatewayError):
    """The gateway is going down."""

    status, kind, code = 503, "server_error", "draining"


class LedgerFull(GatewayError):
    """So many bills wait for the ledger that this one might be lost."""

    status, kind, code = 503, "server_error", "ledger_full"


class LedgerAway(GatewayError):
    """The ledger's database cannot be reached, so nothing can be read from it."""

    status, kind, code = 503, "server_error", "ledger_unavailable"


class UpstreamUnusable(GatewayError):
    """Engines were tried and none answered."""

    status, kind, code = 502, "upstream_error", "upstream_failed"


class UpstreamTimeout(UpstreamUnusable):
    """An engine was silent for longer than it may be."""

    status, code = 504, "upstream_timeout"


class OverTime(UpstreamTimeout):
    """An answer took longer than an answer may take. Nobody goes on with it."""

    code = "over_time"


class EngineGaveUp(UpstreamUnusable):
    """An engine ended its stream with an error. ``engine_body`` holds its own words."""

    code = "engine_gave_up"

    def __init__(self, engine_body: bytes, *, code: str | None = None) -> None:
        super().__init__("the engine gave up on this answer", code=code)
        self.engine_body = engine_body


class SettingsError(Exception):
    """The settings are wrong; each line of the message names a source, a path and what is wrong there."""
