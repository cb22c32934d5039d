"""The default model's folder, fetched and converted once for all tests of this package."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine_adapter.embedded.folders import ensure_default_model
from engine_adapter.prompt import PromptEncoder


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def encoder(model_dir: Path) -> PromptEncoder:
    return PromptEncoder.load(model_dir)
