"""The shape of a model, read from a Hugging Face ``config.json``: Llama, Qwen2 and Qwen3 (dense).

The three differ in what the weights hold (biases on q, k, v; norms on q and k), not in what is computed, so one
description serves all. What this engine cannot compute is refused here by name, never computed wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_adapter.embedded.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. ``kind`` is ``default``, ``linear`` or ``llama3``; the last four matter to ``llama3`` only."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return float32 (head_dim / 2,), radians per position. ``llama3`` is the rule of Meta's reference code."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            wavelengths = 2 * math.pi / frequencies
            turns = self.original_context / wavelengths
            blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            blend = blend.clamp(0.0, 1.0)  # 0: a slow wave, stretched; 1: a fast wave, kept
            return (1 - blend) * frequencies / self.factor + blend * frequencies
        return frequencies


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the forward pass needs to know besides the tensors."""

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_tokens: int
    tied_embeddings: bool
    rope: RopeConfig

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Read ``config.json``. Raises ``ModelError`` for a file that is absent, malformed, or not a model of ours."""
        path = model_dir / "config.json"
        try:
            return cls.from_hf(json.loads(path.read_text()))
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: {error!r}") from error

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read transformers' names, old (``rope_theta``, ``rope_scaling``) and new (``rope_parameters``)."""
        refuse_unsupported(raw)
        heads = int(raw["num_attention_heads"])
        return cls(
            architecture=raw["model_type"],
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            mlp_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            context_tokens=int(raw["max_position_embeddings"]),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope=rope_config(raw),
        )


def rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Read the rotary part of a config. Raises ``ModelError`` for a kind of scaling that is not computed here."""
    rope: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"rope type {kind!r} is not supported")
    return RopeConfig(
        theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(rope.get("factor", 1.0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_context=int(rope.get("original_max_position_embeddings", raw["max_position_embeddings"])),
    )


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` naming the first thing in the config that would be computed wrongly."""
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(f"model type {kind!r} is not one of {', '.join(ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation {raw['hidden_act']!r} is not supported")
    if raw.get("use_sliding_window"):
        raise ModelError("sliding-window attention is not supported")
    if raw.get("quantization_config"):
        raise ModelError("quantized weights are not supported")
    rope = raw.get("rope_parameters") or {}
    if (raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
