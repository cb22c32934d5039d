"""The forward pass of a Llama-family model over a flattened batch of tokens, with KV in pages.

One step mixes any number of sequences, each with one token (decode) or many (prefill); everything but attention treats
them alike. Logits are computed only where a token will be sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_adapter.embedded.attention import Span, StepPlan
from engine_adapter.embedded.config import ModelConfig
from engine_adapter.embedded.errors import ModelError
from engine_adapter.embedded.linear import Linear, make_linear
from kvstore.page import PageLayout


@dataclass(slots=True)
class Layer:
    """The weights of one decoder layer. q, k and v are one product, gate and up another."""

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """A model ready to run. Not thread-safe; its state is its weights, the sequences' state is in the pages."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors under Hugging Face's names. Raises ``ModelError`` where one is missing or misshapen."""
        weights = _Tensors(config, tensors)
        self.config = config
        self.embedding = weights.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.layers = [weights.layer(index) for index in range(config.layers)]
        self.norm = weights.get("model.norm.weight", config.hidden_size)
        head = self.embedding
        if not config.tied_embeddings:
            head = weights.get("lm_head.weight", config.vocab_size, config.hidden_size)
        self.head = make_linear(head)
        self._cos, self._sin = self._rotations()

    def page_layout(self, weights_id: str, page_tokens: int) -> PageLayout:
        """Return the layout of this model's pages; ``weights_id`` as ``weights.weights_id`` gives it."""
        config = self.config
        return PageLayout(
            weights_id=weights_id,
            dtype=str(self.dtype).removeprefix("torch."),
            page_tokens=page_tokens,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that one decode step reads."""
        matrices = (m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return self.head.weight_bytes + sum(matrix.weight_bytes for matrix in matrices)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], kv: torch.Tensor) -> torch.Tensor:
        """Compute one step; K and V of every token land in ``kv``, the device tier's tensor.

        Returns logits (spans that want them, vocab) in the order of ``spans``.
        """
        plan = StepPlan.make(spans, kv)
        ids = [token for span in plan.spans for token in span.token_ids]
        positions = torch.tensor([p for span in plan.spans for p in range(span.start, span.end)])
        x = self.embedding[torch.tensor(ids).to(self.device)]
        cos, sin = self._cos[positions].to(self.device), self._sin[positions].to(self.device)
        for index, layer in enumerate(self.layers):
            x += self._attention(plan, index, layer, x, cos, sin)
            x += self._mlp(layer, x)
        rows = _sampled_rows(plan)
        return self.head(self._rms_norm(x[rows.to(self.device)], self.norm))

    def _attention(
        self, plan: StepPlan, index: int, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        config = self.config
        qkv = layer.qkv(self._rms_norm(x, layer.attention_norm)).view(len(x), -1, config.head_dim)
        if layer.query_norm is None or layer.key_norm is None:
            rotated = _rotate(qkv[:, : config.heads + config.kv_heads], cos, sin)
            q, k = rotated[:, : config.heads], rotated[:, config.heads :]
        else:
            q, k, _ = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], 1)
            q = _rotate(self._rms_norm(q, layer.query_norm), cos, sin)
            k = _rotate(self._rms_norm(k, layer.key_norm), cos, sin)
        mixed = plan.attend(index, q, k, qkv[:, config.heads + config.kv_heads :])
        return layer.output(mixed.reshape(len(x), -1))

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, -1)
        return layer.down(functional.silu(gate).mul_(up))

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _rotations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin for every position, each (context, 1, head_dim), shaped for ``_rotate``."""
        config = self.config
        angles = torch.outer(
            torch.arange(config.context_tokens, dtype=torch.float32), config.rope.inverse_frequencies(config.head_dim)
        )
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return torch.cat([cos, cos], 1).unsqueeze(1), torch.cat([-sin, sin], 1).unsqueeze(1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head against each other: (tokens, heads, head_dim), RoPE as in transformers."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _sampled_rows(plan: StepPlan) -> torch.Tensor:
    """Return the flattened position of the last token of each span that wants logits, in the order of the caller."""
    last, rows = -1, {}
    for index, span in zip(plan.order, plan.spans, strict=True):
        last += len(span.token_ids)
        if span.wants_logits:
            rows[index] = last
    return torch.tensor([rows[index] for index in sorted(rows)], dtype=torch.int64)


class _Tensors:
    """Checked access to a checkpoint's tensors."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._config, self._tensors = config, tensors

    def get(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"the weights have no tensor {name}")
        if tensor.shape != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
        return tensor

    def linear(self, names: Sequence[str], outputs: Sequence[int], inputs: int) -> Linear:
        """Return one product for all of ``names``; those without a bias get zeros where another has one."""
        weight = [self.get(f"{name}.weight", out, inputs) for name, out in zip(names, outputs, strict=True)]
        bias = None
        if any(f"{name}.bias" in self._tensors for name in names):
            bias = torch.cat([
                self.get(f"{name}.bias", out) if f"{name}.bias" in self._tensors else w.new_zeros(out)
                for name, out, w in zip(names, outputs, weight, strict=True)
            ])  # fmt: skip
        return make_linear(torch.cat(weight), bias)

    def layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        normed = attention + "q_norm.weight" in self._tensors
        return Layer(
            attention_norm=self.get(prefix + "input_layernorm.weight", hidden),
            qkv=self.linear(
                [attention + "q_proj", attention + "k_proj", attention + "v_proj"], [queries, keys, keys], hidden
            ),
            query_norm=self.get(attention + "q_norm.weight", config.head_dim) if normed else None,
            key_norm=self.get(attention + "k_norm.weight", config.head_dim) if normed else None,
            output=self.linear([attention + "o_proj"], [hidden], queries),
            mlp_norm=self.get(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self.linear([mlp + "gate_proj", mlp + "up_proj"], [config.mlp_size] * 2, hidden),
            down=self.linear([mlp + "down_proj"], [hidden], config.mlp_size),
        )
