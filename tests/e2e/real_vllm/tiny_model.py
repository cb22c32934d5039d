"""Makes a tiny Llama that vLLM's CPU kernels take, with random weights: ``python tiny_model.py FOLDER SEED``.

Runs under vLLM's interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.real_sglang_index.tiny_model import VOCABULARY, make_tokenizer


def make_model(folder: Path, end_of_answer: int, seed: int) -> None:
    """Save a model of some 700,000 parameters, with heads of 32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16_384,
        bos_token_id=None,
        eos_token_id=end_of_answer,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(target)
    make_model(target, tokenizer.convert_tokens_to_ids("<|im_end|>"), int(sys.argv[2]))
