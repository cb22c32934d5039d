"""Tekken: Mistral's tokenizer files (``tekken.json``), read as a tokenizer of the ``tokenizers`` library.

A tekken file lists byte strings by rank, and text is merged in the order of ranks (as tiktoken does it). The library's
BPE wants the pairs instead: for each byte string, the two halves it is merged from, in the order of ranks.

Source: mistral-common's ``Tekkenizer``, which is what the tests compare with.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

_FIRST_CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Control tokens of files that list none (up to their version 7); the rest are fillers."""


def load_tekken(path: Path) -> Tokenizer:
    """Read the file. Raises ``OSError``, ``ValueError`` and ``KeyError`` for what is not one. Takes some seconds."""
    description = json.loads(path.read_text(encoding="utf-8"))
    config = description["config"]
    control_count = int(config["default_num_special_tokens"])
    entries = description["vocab"][: int(config["default_vocab_size"]) - control_count]
    ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in entries}
    listed = description.get("special_tokens")
    texts = [token["token_str"] for token in listed] if listed else list(_FIRST_CONTROL)
    texts += [f"<SPECIAL_{number}>" for number in range(len(texts), control_count)]
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank + control_count for token, rank in ranks.items()}
    tokenizer = Tokenizer(
        models.BPE(
            {**{text: number for number, text in enumerate(texts)}, **vocabulary},
            [(spelled[left], spelled[right]) for left, right in _merges(ranks)],
            ignore_merges=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs that merge to each token, in the order of its rank; the pair of lower ranks first."""
    found = []
    for token, rank in ranks.items():
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in pairs if left in ranks and right in ranks]
        found += [(rank, *pair) for pair in sorted(known)]
    found.sort(key=lambda pair: pair[0])
    return [(left, right) for _, _, _, left, right in found]


def _byte_letters() -> list[str]:
    """Return the printable letter by which byte-level BPE writes each byte (GPT-2's table)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {byte: chr(256 + number) for number, byte in enumerate(moved)}
    return [letters[byte] for byte in range(256)]
