"""What each API says of the same disjoint token classes, whole and as a stream, and how it is read.

``counts`` has the classes ``fresh, hit, device, host, disk, pool, write, write_5m, write_1h, output, reasoning``; each
shape uses those that its API can tell and says which class each becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from billing.counts import UsageReading
from billing.usage import (
    anthropic_stream_usage,
    anthropic_usage,
    embeddings_usage,
    gemini_usage,
    llamacpp_usage,
    ollama_usage,
    openai_usage,
    responses_usage,
    sglang_generate_usage,
    with_hits_of,
)

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Shape:
    """``uses``: of a count's name, the class that is billed. ``streamed`` reads what a stream told last."""

    name: str
    uses: Mapping[str, str]
    whole: Callable[[Counts], UsageReading]
    streamed: Callable[[Counts], UsageReading]

    def classes(self, counts: Counts) -> dict[str, int]:
        """Return what must be billed."""
        billed: dict[str, int] = {}
        for name, token_class in self.uses.items():
            billed[token_class] = billed.get(token_class, 0) + counts[name]
        return billed


_PLAIN = {"fresh": "fresh", "hit": "hit_unknown", "output": "output"}


def _chat(c: Counts, cached: int, written: int = 0) -> dict[str, object]:
    prompt = c["fresh"] + cached + written
    return {
        "prompt_tokens": prompt,
        "completion_tokens": c["output"],
        "total_tokens": prompt + c["output"],
        "completion_tokens_details": {"reasoning_tokens": c["reasoning"]},
    }


def _openai(c: Counts) -> UsageReading:
    details = {"cached_tokens": c["hit"], "cache_write_tokens": c["write"]}
    return openai_usage(_chat(c, c["hit"], c["write"]) | {"prompt_tokens_details": details})


def _silent(c: Counts) -> UsageReading:
    """An engine that tells no zero: what is left out is none."""
    details = {"cached_tokens": c["hit"]} if c["hit"] else None
    return openai_usage(_chat(c, c["hit"]) | {"prompt_tokens_details": details}, silence_is_zero=True)


def _tiers(c: Counts) -> dict[str, object]:
    return {
        "device": c["device"],
        "host": c["host"],
        "storage": c["disk"] + c["pool"],
        "disk": c["disk"],
        "pool": c["pool"],
    }


def _hits(c: Counts) -> int:
    return c["device"] + c["host"] + c["disk"] + c["pool"]


def _sglang(c: Counts) -> UsageReading:
    usage = _chat(c, _hits(c)) | {"prompt_tokens_details": {"cached_tokens": _hits(c)}}
    return openai_usage(usage, {"cached_tokens_details": _tiers(c)})


def _generate(c: Counts) -> UsageReading:
    meta = {"prompt_tokens": c["fresh"] + _hits(c), "completion_tokens": c["output"], "cached_tokens": _hits(c)}
    return sglang_generate_usage(meta | {"cached_tokens_details": _tiers(c)})


def _separated(c: Counts) -> UsageReading:
    """The decode node calls all but one token cached; the prefill node knows better."""
    prompt = c["fresh"] + c["hit"]
    decode = openai_usage(_chat(c, c["hit"]) | {"prompt_tokens_details": {"cached_tokens": max(prompt - 1, 0)}})
    prefill = {"prompt_tokens": prompt, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": c["hit"]}}
    return with_hits_of(decode, openai_usage(prefill))


def _deepseek(c: Counts) -> UsageReading:
    return openai_usage(
        _chat(c, c["hit"]) | {"prompt_cache_hit_tokens": c["hit"], "prompt_cache_miss_tokens": c["fresh"]}
    )


def _moonshot(c: Counts) -> UsageReading:
    return openai_usage(_chat(c, c["hit"]) | {"cached_tokens": c["hit"]})


def _qwen(c: Counts) -> UsageReading:
    creation = {"cached_tokens": c["hit"], "cache_creation": {"ephemeral_5m_input_tokens": c["write_5m"]}}
    return openai_usage(_chat(c, c["hit"], c["write_5m"]) | {"prompt_tokens_details": creation})


def _responses(c: Counts) -> UsageReading:
    prompt = c["fresh"] + c["hit"] + c["write"]
    return responses_usage(
        {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": c["hit"], "cache_write_tokens": c["write"]},
            "output_tokens": c["output"],
            "output_tokens_details": {"reasoning_tokens": c["reasoning"]},
            "total_tokens": prompt + c["output"],
        }
    )


def _messages(c: Counts) -> dict[str, object]:
    return {
        "input_tokens": c["fresh"],
        "cache_read_input_tokens": c["hit"],
        "cache_creation_input_tokens": c["write_5m"] + c["write_1h"],
        "cache_creation": {
            "ephemeral_5m_input_tokens": c["write_5m"],
            "ephemeral_1h_input_tokens": c["write_1h"],
        },
    }


def _told_output(c: Counts) -> dict[str, object]:
    return {"output_tokens": c["output"], "output_tokens_details": {"thinking_tokens": c["reasoning"]}}


def _anthropic(c: Counts) -> UsageReading:
    return anthropic_usage(_messages(c) | _told_output(c))


def _anthropic_stream(c: Counts) -> UsageReading:
    return anthropic_stream_usage(_messages(c) | {"output_tokens": 1}, _told_output(c))


def _anthropic_late(c: Counts) -> UsageReading:
    """A compatible server that tells of the cache in the last event only."""
    return anthropic_stream_usage(
        {"input_tokens": c["fresh"], "output_tokens": 0}, _messages(c) | {"output_tokens": c["output"]}
    )


def _gemini(c: Counts) -> UsageReading:
    prompt, candidates = c["fresh"] + c["hit"], c["output"] - c["reasoning"]
    told = {
        "promptTokenCount": prompt,
        "cachedContentTokenCount": c["hit"],
        "candidatesTokenCount": candidates,
        "thoughtsTokenCount": c["reasoning"],
        "totalTokenCount": prompt + c["output"],
    }
    return gemini_usage({name: count for name, count in told.items() if count or name == "promptTokenCount"})


def _llamacpp(c: Counts) -> UsageReading:
    timings = {"cache_n": c["hit"], "prompt_n": c["fresh"], "predicted_n": c["output"]}
    usage = {"prompt_tokens": c["fresh"] + c["hit"], "completion_tokens": c["output"]}
    return llamacpp_usage(usage, timings)


def _llamacpp_timings(c: Counts) -> UsageReading:
    return llamacpp_usage(None, {"cache_n": c["hit"], "prompt_n": c["fresh"], "predicted_n": c["output"]})


def _ollama(c: Counts) -> UsageReading:
    told = {"prompt_eval_count": c["fresh"] + c["hit"], "prompt_eval_cached_count": c["hit"], "eval_count": c["output"]}
    return ollama_usage(told)


def _embeddings(c: Counts) -> UsageReading:
    return embeddings_usage({"prompt_tokens": c["fresh"], "total_tokens": c["fresh"]})


_TIERED = {"fresh": "fresh", "device": "hit_device", "host": "hit_host", "disk": "hit_disk", "pool": "hit_pool"}
_TIERED |= {"output": "output"}
_LIFETIMES = {"write_5m": "write_5m", "write_1h": "write_1h"}

SHAPES = (
    Shape("openai", _PLAIN | {"write": "write"}, _openai, _openai),
    Shape("vllm", _PLAIN, _silent, _silent),
    Shape("sglang", _TIERED, _sglang, _sglang),
    Shape("sglang-generate", _TIERED, _generate, _generate),
    Shape("prefill-decode", _PLAIN, _separated, _separated),
    Shape("deepseek", _PLAIN, _deepseek, _deepseek),
    Shape("moonshot", _PLAIN, _moonshot, _moonshot),
    Shape("qwen", _PLAIN | {"write_5m": "write_5m"}, _qwen, _qwen),
    Shape("responses", _PLAIN | {"write": "write"}, _responses, _responses),
    Shape("anthropic", _PLAIN | _LIFETIMES, _anthropic, _anthropic_stream),
    Shape("anthropic-late", _PLAIN | _LIFETIMES, _anthropic, _anthropic_late),
    Shape("gemini", _PLAIN, _gemini, _gemini),
    Shape("llama.cpp", _PLAIN, _llamacpp, _llamacpp_timings),
    Shape("ollama", _PLAIN, _ollama, _ollama),
    Shape("embeddings", {"fresh": "fresh"}, _embeddings, _embeddings),
)
