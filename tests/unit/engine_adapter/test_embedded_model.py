"""The forward pass against transformers, on tiny random models whose every tensor matters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine_adapter.embedded.attention import Span, padded_tokens
from engine_adapter.embedded.config import ModelConfig
from engine_adapter.embedded.errors import ModelError
from engine_adapter.embedded.weights import load_model
from tests.samples.engines import VOCAB, load_tiny_model, make_tiny_model

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, dict[str, object]] = {
    "llama": {"architecture": "llama", "tie_word_embeddings": True},
    "llama-untied-biased": {
        "architecture": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "llama3-rope": {"architecture": "llama", "rope_parameters": LLAMA3_ROPE},
    "linear-rope": {
        "architecture": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama-no-groups": {"architecture": "llama", "num_key_value_heads": 4},
    "qwen2": {"architecture": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"architecture": "qwen3", "tie_word_embeddings": True},
}  # fmt: skip
PAGE_TOKENS = 4
TOLERANCE = 1e-4  # transformers' norms compute in float32


def token_ids(count: int) -> list[int]:
    torch.manual_seed(count)
    return torch.randint(0, VOCAB, (count,)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_split_of_every_batch_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    reference = make_tiny_model(tmp_path, **MODELS[name])  # type: ignore[arg-type]
    model = load_tiny_model(tmp_path)
    layout = model.page_layout("tiny", PAGE_TOKENS)
    kv = torch.full((80, *layout.page_shape), 7e3, dtype=torch.float64)  # what was not written must not matter
    prompts = [token_ids(count) for count in (1, 4, 5, 23, 97)]
    torch.manual_seed(1)
    slots = torch.randperm(80).tolist()
    tables = [[slots.pop() for _ in range(len(prompt) // PAGE_TOKENS + 1)] for prompt in prompts]
    with torch.inference_mode():
        wanted = [reference(torch.tensor([prompt])).logits[0] for prompt in prompts]
    done = [0] * len(prompts)
    for sizes in ([1, 1, 3, 7, 64], [0, 2, 1, 1, 1], [0, 1, 1, 1, 30], [0, 0, 0, 14, 2]):
        active = [index for index, size in enumerate(sizes) if size]
        spans = [Span(prompts[i][done[i] : done[i] + sizes[i]], done[i], tables[i]) for i in active]
        logits = model.forward(spans, kv)
        for row, i in enumerate(active):
            done[i] += sizes[i]
            torch.testing.assert_close(logits[row], wanted[i][done[i] - 1], rtol=0, atol=TOLERANCE)
    assert done == [1, 4, 5, 23, 97]


def float32_logits(folder: Path, steps: list[list[tuple[int, int, int]]]) -> dict[tuple[int, int], torch.Tensor]:
    """Return the logits behind each (prompt's length, end) of the spans (length, start, end) of each step."""
    model = load_model(folder, torch.float32)
    kv = torch.full((400, *model.page_layout("tiny", PAGE_TOKENS).page_shape), 7e3)
    lengths = sorted({length for step in steps for length, _, _ in step})
    torch.manual_seed(len(steps))
    slots = torch.randperm(400).tolist()
    tables = {length: [slots.pop() for _ in range(length // PAGE_TOKENS + 1)] for length in lengths}
    found = {}
    for step in steps:
        spans = [Span(token_ids(length)[start:end], start, tables[length]) for length, start, end in step]
        for (length, _, end), row in zip(step, model.forward(spans, kv), strict=True):
            found[length, end] = row
    return found


@pytest.mark.parametrize("weights", ["float32", "half"])
@pytest.mark.parametrize("name", ["llama", "llama-no-groups", "qwen3"])
def test_logits_are_the_same_to_the_bit_whatever_is_beside_and_however_it_is_cut(
    tmp_path: Path, name: str, weights: str
) -> None:
    reference = make_tiny_model(tmp_path, **MODELS[name])  # type: ignore[arg-type]
    if weights == "half":
        for parameter in reference.parameters():
            parameter.data = parameter.data.half().float()
        reference.save_pretrained(tmp_path)
    lengths = (6, 17, 34, 66, 97)
    alone = [float32_logits(tmp_path, [[(length, 0, length)]]) for length in lengths]
    ways = {
        "beside": [[(length, 0, length) for length in lengths]],
        "token by token, beside": [
            [(length, 0, length - 5) for length in lengths],
            *[[(length, length - left, length - left + 1) for length in lengths] for left in range(5, 0, -1)],
        ],
        "cut": [
            [(length, start, min(start + 11, length)) for length in lengths if start < length]
            for start in range(0, max(lengths), 11)
        ],
    }
    for way, steps in ways.items():
        found = float32_logits(tmp_path, steps)
        for length, one in zip(lengths, alone, strict=True):
            assert torch.equal(found[length, length], one[length, length]), (way, length)


@pytest.mark.parametrize("tokens", [1, 16, 17, 256, 257, 512, 513, 768, 769, 5000])
def test_a_context_is_padded_so_that_a_longer_one_is_summed_in_the_same_parts(tokens: int) -> None:
    padded = padded_tokens(tokens)
    assert tokens <= padded < tokens + 256
    assert padded % 16 == 0
    assert padded % 512 <= 256


def test_logits_come_only_where_they_are_wanted_in_the_order_asked(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    model = load_tiny_model(tmp_path)
    kv = torch.zeros((8, *model.page_layout("tiny", PAGE_TOKENS).page_shape), dtype=torch.float64)
    prompts = [token_ids(6), token_ids(1), token_ids(5)]
    alone = [model.forward([Span(p, 0, [2 * i, 2 * i + 1])], kv)[0] for i, p in enumerate(prompts)]
    spans = [Span(p, 0, [2 * i, 2 * i + 1], wants_logits=i != 2) for i, p in enumerate(prompts)]
    together = model.forward(spans, kv)
    assert together.shape == (2, VOCAB)
    torch.testing.assert_close(together, torch.stack(alone[:2]), rtol=0, atol=1e-9)


def test_the_layout_describes_the_pages(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    layout = load_model(tmp_path, torch.bfloat16).page_layout("some id", 16)
    assert (layout.weights_id, layout.dtype) == ("some id", "bfloat16")
    assert layout.page_shape == (2, 2, 16, 2, 32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"hidden_size": "wide"}, "wide"),
        ({"vocab_size": None}, "config.json"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    make_tiny_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=complaint):
        ModelConfig.load(tmp_path)


def test_a_config_of_older_transformers_reads_the_same(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, rope_parameters=LLAMA3_ROPE)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    old = {name: value for name, value in raw.items() if name not in ("rope_parameters", "head_dim")}
    old |= {"rope_theta": 10000.0, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}, "hidden_size": 128}
    new = ModelConfig.load(tmp_path)
    read = ModelConfig.from_hf(old)
    assert read.rope == new.rope
    assert read.head_dim == new.head_dim == 32


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"model\.layers\.2"):
        load_tiny_model(tmp_path)
    path.write_text(json.dumps(raw | {"intermediate_size": 95}))
    with pytest.raises(ModelError, match="gate_proj"):
        load_tiny_model(tmp_path)
