"""The official clients on a gateway of the tests, and a strict look at what they parsed.

The clients build their objects without checking them; ``strictly`` checks one against the client's own types.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

Parsed = TypeVar("Parsed", bound=BaseModel)


def strictly(value: Parsed) -> Parsed:
    """Return the value after its type has validated what it was built from."""
    type(value).model_validate_json(value.model_dump_json(exclude_unset=True, by_alias=True, warnings="error"))
    return value


@asynccontextmanager
async def openai_client(url: str, key: str = "none", **more: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **more) as client:
        yield client


@asynccontextmanager
async def anthropic_client(url: str, key: str = "none", **more: Any) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0, **more) as client:
        yield client
