"""Every kind of error on every endpoint, as what the official clients raise: the right class, and words that they read.

What the gateway refuses itself, and what its engine refuses or fails at, whole and in streams.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.gateways import Client, gateway_for
from tests.samples.sdk import anthropic_client, openai_client
from tests.scripted_engine import Script, ScriptedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: list[Any] = [{"role": "user", "content": "hi"}]
ROOT, FINANCE, LIMITED, UNKNOWN = "sk-root", "sk-finance", "sk-limited", "sk-unknown"
KEYS = [
    {"id": "root", "secret": ROOT, "admin": True},
    {"id": "finance", "secret": FINANCE, "roles": ["finance"]},
    {"id": "limited", "secret": LIMITED},
]
LIMITS = [{"key": "limited", "requests_per_minute": 0}]
LONG = "x" * 9000

Call = Callable[[str, str, str, str], Awaitable[object]]
"""Asks for a model with a text: URL, key, model, text."""


def _through(client_of: Callable[[str, str], Any], ask: Callable[[Any, str, str], Awaitable[Any]]) -> Call:
    async def call(url: str, key: str, model: str, text: str) -> None:
        async with client_of(url, key) as client:
            told = await ask(client, model, text)
            if isinstance(told, openai.AsyncStream | anthropic.AsyncStream):
                async for _ in told:
                    pass

    return call


_gpt, _claude = partial(_through, openai_client), partial(_through, anthropic_client)


def _said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


CALLS: dict[str, Call] = {
    "chat": _gpt(lambda c, m, t: c.chat.completions.create(model=m, messages=_said(t))),
    "chat streamed": _gpt(lambda c, m, t: c.chat.completions.create(model=m, messages=_said(t), stream=True)),
    "completions": _gpt(lambda c, m, t: c.completions.create(model=m, prompt=t)),
    "completions streamed": _gpt(lambda c, m, t: c.completions.create(model=m, prompt=t, stream=True)),
    "responses": _gpt(lambda c, m, t: c.responses.create(model=m, input=t)),
    "responses streamed": _gpt(lambda c, m, t: c.responses.create(model=m, input=t, stream=True)),
    "embeddings": _gpt(lambda c, m, t: c.embeddings.create(model=m, input=t)),
    "messages": _claude(lambda c, m, t: c.messages.create(model=m, messages=_said(t), max_tokens=4)),
    "messages streamed": _claude(
        lambda c, m, t: c.messages.create(model=m, messages=_said(t), max_tokens=4, stream=True)
    ),
    "count_tokens": _claude(lambda c, m, t: c.messages.count_tokens(model=m, messages=_said(t))),
    "input_tokens": _gpt(lambda c, m, t: c.responses.input_tokens.count(model=m, input=t)),
}
generating = [name for name in CALLS if name not in ("count_tokens", "input_tokens")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(running_engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    home = tmp_path_factory.mktemp("home")
    settings: dict[str, Any] = {
        "server": {"body_cap_bytes": 8000},
        "keys": KEYS,
        "limits": LIMITS,
        "retry": {"attempts": 1},
        "health": {"interval_s": 0.05, "timeout_s": 2.0, "breaker_failures": 1000},
    }
    async with gateway_for([running_engine], home, **settings) as client:
        yield client
        assert client.at_rest()


async def raised(call: str, url: str, *, key: str = ROOT, model: str = "m", text: str = "hi") -> Any:
    """Return the error that the client raised, after looking at what is the same of all."""
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        await CALLS[call](url, key, model, text)
    error: Any = caught.value
    assert error.message
    if isinstance(error, anthropic.APIStatusError):
        body: Any = error.body
        assert set(body) == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(error.body) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("call", CALLS)
async def test_what_the_gateway_refuses(gateway: Client, engine: ScriptedEngine, call: str) -> None:
    url = gateway.url
    sdk: Any = anthropic if isinstance(await raised(call, url, key=UNKNOWN), anthropic.APIStatusError) else openai
    assert isinstance(await raised(call, url, key=UNKNOWN), sdk.AuthenticationError)
    assert isinstance(await raised(call, url, key=FINANCE), sdk.PermissionDeniedError)
    assert isinstance(await raised(call, url, model="unheard-of"), sdk.NotFoundError)
    assert (await raised(call, url, text=LONG)).status_code == 413
    if call in generating:
        limited = await raised(call, url, key=LIMITED)
        assert isinstance(limited, sdk.RateLimitError)
    assert engine.asked == []


@pytest.mark.parametrize("call", [name for name in generating if name != "embeddings"])
@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "BadRequestError"),
        (404, "NotFoundError"),
        (409, "ConflictError"),
        (413, "APIStatusError"),
        (422, "UnprocessableEntityError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "InternalServerError"),
    ],
)
async def test_what_the_engine_refuses_or_fails_at(
    gateway: Client, engine: ScriptedEngine, call: str, status: int, name: str
) -> None:
    engine.script = Script(
        status=status, body={"error": {"message": "not so", "type": "odd", "param": None, "code": None}}
    )
    error = await raised(call, gateway.url)
    sdk: Any = anthropic if isinstance(error, anthropic.APIStatusError) else openai
    assert isinstance(error, getattr(sdk, name))
    assert error.status_code in ((status,) if status < 500 else (status, 502, 503))
    if status < 429:
        assert "not so" in str(error)
