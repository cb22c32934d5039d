"""Encoders of real models, loaded once for all tests that use them: some of the tokenizers take seconds to load."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from engine_adapter.prompt import PromptEncoder
from tests.model_tokenizers import NotFetched, tokenizer_folder

TOOL_TEMPLATES = {
    "smollm2": "chatml-tools",
    "qwen3": "model",
    "llama3_1": "llama3-tools",
    "deepseek_v3": "deepseek-v3-tools",
    "gemma3": "gemma3-tools",
    "mistral_v3": "mistral-v3",
}
"""Each family with the template that it gets for tools when none is named."""


def folder_of(name: str) -> Path:
    """Return a model's folder; skips the test where it could not be fetched."""
    try:
        return tokenizer_folder(name)
    except NotFetched as error:
        pytest.skip(str(error))


@cache
def encoder_of(name: str, template: str) -> PromptEncoder:
    """Return a model's encoder with this template, the same one at every call."""
    return PromptEncoder.load(folder_of(name), template=template)
