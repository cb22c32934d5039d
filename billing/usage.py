"""Every engine's and API's usage object, read into disjoint token classes. One function per shape.

What differs between them, and is easily billed wrong, is what the prompt count contains:

=====================  ==============================  ==========================================
shape                  cached and written tokens       reasoning
=====================  ==============================  ==========================================
OpenAI chat, engines   inside ``prompt_tokens``        inside ``completion_tokens`` (xAI: beside)
OpenAI Responses       inside ``input_tokens``         inside ``output_tokens``
Anthropic Messages     **beside** ``input_tokens``     inside ``output_tokens``
Gemini                 inside ``promptTokenCount``     **beside** ``candidatesTokenCount``
llama.cpp timings      **beside** ``prompt_n``         not told
Ollama                 inside ``prompt_eval_count``    not told
=====================  ==============================  ==========================================

All functions are pure, accept whatever JSON gives, and never raise: what cannot be read is a problem in the reading.
In streams these counts are cumulative: the last value counts, chunks are never summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from billing.counts import MAX_TOOL_USES, Counts, ProblemCode, TierHits, UsageReading, Writes
from billing.rates import TOOLS
from tracing.record import HitSource, Usage, UsageSource

Json = Mapping[str, object]

#: SGLang storage backends whose pages lie on this host's disk, and those that several hosts share.
_DISK_BACKENDS = frozenset({"file"})
_POOL_BACKENDS = frozenset({"mooncake", "hf3fs", "nixl", "aibrix", "eic", "redis", "valkey", "lmcache"})


def _object(source: Json | None, field: str) -> Json | None:
    """Return the object in ``field``, or ``None``: engines send null for an object that is empty."""
    value = None if source is None else source.get(field)
    return value if isinstance(value, Mapping) else None


def openai_usage(usage: Json | None, sglext: Json | None = None, *, silence_is_zero: bool = False) -> UsageReading:
    """Read the usage of chat completions and completions: OpenAI, SGLang, vLLM, DeepSeek, Moonshot, Qwen, OpenRouter.

    ``sglext`` is SGLang's extension with the hits per tier. ``silence_is_zero`` says that this engine was asked for
    its hits and tells them whenever there are any, so that a missing or null count means none; without it a missing
    count means unknown.
    """
    counts = Counts()
    details = _object(usage, "prompt_tokens_details")
    hit = counts.read(usage, "prompt_cache_hit_tokens")  # DeepSeek
    miss = counts.read(usage, "prompt_cache_miss_tokens")
    cached = counts.agreed(
        {
            "cached_tokens": counts.read(details, "cached_tokens"),
            "prompt_cache_hit_tokens": hit,
            "usage.cached_tokens": counts.read(usage, "cached_tokens"),  # Moonshot
            "cache_read_input_tokens": counts.read(usage, "cache_read_input_tokens"),  # bridged from Anthropic
        }
    )
    prompt = counts.read(usage, "prompt_tokens")
    if hit is not None and miss is not None:
        if prompt is None:
            prompt = hit + miss
        elif hit + miss != prompt:
            counts.alarm(ProblemCode.TOTAL_DISAGREES, f"{hit} hit and {miss} missed of a prompt of {prompt}")
    tiers = _sglang_tiers(counts, _object(sglext, "cached_tokens_details"))
    if silence_is_zero and cached is None and tiers is None:
        tiers = TierHits()
    output = counts.read(usage, "completion_tokens")
    reasoning = counts.read(_object(usage, "completion_tokens_details"), "reasoning_tokens")
    if reasoning is None:
        reasoning = counts.read(usage, "reasoning_tokens")  # SGLang
    total = counts.read(usage, "total_tokens")
    if prompt is not None and output is not None:
        if reasoning and total == prompt + output + reasoning:  # xAI: reasoning stands beside the completion
            output += reasoning
        counts.check_total(total, prompt + output)
    return counts.close(
        prompt=prompt,
        output=output,
        cached=cached,
        tiers=tiers,
        writes=_openai_writes(counts, details),
        reasoning=reasoning,
        tool_uses=_tool_uses(counts, usage),
    )


def _tool_uses(counts: Counts, usage: Json | None) -> tuple[tuple[str, int], ...]:
    """Read ``server_tool_use`` (Anthropic, OpenRouter): how often the API ran each of its tools.

    A tool that is not known is an alarm: what it costs is in no line.
    """
    told = _object(usage, "server_tool_use")
    if told is None:
        if usage is not None and usage.get("server_tool_use") is not None:
            counts.alarm(ProblemCode.NOT_A_COUNT, f"server_tool_use is {usage['server_tool_use']!r:.40}")
        return ()
    found: dict[str, int] = {}
    for field in sorted(told):
        uses, tool = counts.read(told, field, MAX_TOOL_USES), str(field).removesuffix("_requests")
        if uses and tool not in TOOLS:
            counts.alarm(ProblemCode.UNKNOWN_TOOL, f"{uses} of {tool!r:.40}")
        elif uses:
            if found.setdefault(tool, uses) != uses:  # told under two names
                counts.alarm(ProblemCode.TOTAL_DISAGREES, f"{tool} is told as {found[tool]} and {uses}")
            found[tool] = max(found[tool], uses)
    return tuple(found.items())


def _openai_writes(counts: Counts, details: Json | None) -> Writes:
    """Read cache writes from ``prompt_tokens_details``: OpenAI, OpenRouter, Qwen (``cache_creation…``)."""
    lifetimes = _object(details, "cache_creation")
    five = counts.read(lifetimes, "ephemeral_5m_input_tokens") or 0
    hour = counts.read(lifetimes, "ephemeral_1h_input_tokens") or 0
    total = counts.read(details, "cache_write_tokens")
    if total is None:
        total = counts.read(details, "cache_creation_input_tokens")
    if total is None:
        return Writes(five_minutes=five, one_hour=hour)
    if five + hour > total:
        counts.alarm(ProblemCode.WRITES_DISAGREE, f"lifetimes sum to {five + hour}, the total is {total}")
        return Writes(five_minutes=five, one_hour=hour).at_most(total)
    return Writes(plain=total - five - hour, five_minutes=five, one_hour=hour)


def _sglang_tiers(counts: Counts, details: Json | None) -> TierHits | None:
    """Read SGLang's ``cached_tokens_details``; its storage is split where the engine names disk and pool itself."""
    if details is None:
        return None
    device, host = counts.read(details, "device"), counts.read(details, "host")
    disk, pool = counts.read(details, "disk"), counts.read(details, "pool")
    storage = counts.read(details, "storage")
    if all(count is None for count in (device, host, disk, pool, storage)):
        return None
    rest = 0
    if storage is not None:
        rest = storage - (disk or 0) - (pool or 0)
        if rest < 0:
            counts.alarm(ProblemCode.TIERS_DISAGREE, f"disk {disk} and pool {pool} of {storage} in storage")
            rest = 0
    backend = str(details.get("storage_backend") or "").lower()
    return TierHits(
        device=device or 0,
        host=host or 0,
        disk=(disk or 0) + (rest if backend in _DISK_BACKENDS else 0),
        pool=(pool or 0) + (rest if backend in _POOL_BACKENDS else 0),
        unknown=0 if backend in _DISK_BACKENDS | _POOL_BACKENDS else rest,
    )


def sglang_generate_usage(meta_info: Json | None) -> UsageReading:
    """Read ``meta_info`` of SGLang's own ``/generate``."""
    return openai_usage(meta_info, meta_info)


def embeddings_usage(usage: Json | None) -> UsageReading:
    """Read the usage of embeddings and reranking: a prompt, no output."""
    counts = Counts()
    prompt = counts.read(usage, "prompt_tokens")
    total = counts.read(usage, "total_tokens")
    if prompt is None:
        prompt = total
    counts.check_total(total, prompt or 0)
    return counts.close(prompt=prompt, output=0)


def llamacpp_usage(usage: Json | None, timings: Json | None = None) -> UsageReading:
    """Read llama.cpp's server: an OpenAI usage, and ``timings`` in which ``prompt_n`` excludes ``cache_n``."""
    counts = Counts()
    cached = counts.read(timings, "cache_n")
    computed = counts.read(timings, "prompt_n")
    prompt = None if cached is None or computed is None else cached + computed
    output = counts.read(timings, "predicted_n")
    if usage is None:
        return counts.close(prompt=prompt, output=output, cached=cached)
    reading = openai_usage(usage)
    if reading.usage.hit_source is HitSource.UNKNOWN and reading.usage.source is UsageSource.ENGINE:
        merged = {**usage, "prompt_tokens_details": {"cached_tokens": cached}}
        reading = openai_usage(merged)
    if prompt is not None and reading.usage.source is UsageSource.ENGINE:
        counts.check_total(reading.usage.prompt_tokens, prompt)
    return UsageReading(reading.usage, reading.problems + tuple(counts.problems))


def _response_tools(counts: Counts, items: Sequence[object]) -> tuple[tuple[str, int], ...]:
    """Count the calls that OpenAI charges for: searches (a page that is opened costs nothing).

    What it charges otherwise, by container or by image, is an alarm.
    """
    found: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for item in items:
        if not isinstance(item, Mapping):
            continue
        match item.get("type"):
            case "web_search_call":
                action = _object(item, "action")
                found["web_search"] += action is None or action.get("type") in (None, "search")
            case "file_search_call":
                found["file_search"] += 1
            case "code_interpreter_call" | "image_generation_call" as kind:
                unknown[kind] += 1
    for kind, uses in unknown.items():
        counts.alarm(ProblemCode.UNKNOWN_TOOL, f"{uses} of {kind!r}")
    return tuple(sorted((tool, uses) for tool, uses in found.items() if uses))


def responses_usage(usage: Json | None, items: Sequence[object] = ()) -> UsageReading:
    """Read OpenAI's Responses API; in streams the usage of ``response.completed``, ``.incomplete`` or ``.failed``.

    ``items``: the response's output, since its usage does not tell which tools ran.
    """
    counts = Counts()
    details = _object(usage, "input_tokens_details")
    prompt, output = counts.read(usage, "input_tokens"), counts.read(usage, "output_tokens")
    if prompt is not None and output is not None:
        counts.check_total(counts.read(usage, "total_tokens"), prompt + output)
    return counts.close(
        prompt=prompt,
        output=output,
        cached=counts.read(details, "cached_tokens"),
        writes=_openai_writes(counts, details),
        reasoning=counts.read(_object(usage, "output_tokens_details"), "reasoning_tokens"),
        tool_uses=_response_tools(counts, items),
    )


def anthropic_usage(usage: Json | None) -> UsageReading:
    """Read Anthropic's Messages API: input, read and creation are beside one another and sum to the prompt.

    A creation whose lifetime is not told counts as five minutes, the API's default. For streams see
    ``anthropic_stream_usage``.
    """
    counts = Counts()
    fresh = counts.read(usage, "input_tokens")
    read = counts.read(usage, "cache_read_input_tokens")
    writes = _anthropic_writes(counts, usage)
    return counts.close(
        prompt=None if fresh is None else fresh + (read or 0) + writes.total,
        output=counts.read(usage, "output_tokens"),
        cached=read,
        writes=writes,
        reasoning=counts.read(_object(usage, "output_tokens_details"), "thinking_tokens"),
        tool_uses=_tool_uses(counts, usage),
    )


def _anthropic_writes(counts: Counts, usage: Json | None) -> Writes:
    """Read the creation classes; the lifetimes are subsets of the total."""
    lifetimes = _object(usage, "cache_creation")
    five = counts.read(lifetimes, "ephemeral_5m_input_tokens") or 0
    hour = counts.read(lifetimes, "ephemeral_1h_input_tokens") or 0
    total = counts.read(usage, "cache_creation_input_tokens")
    if total is None or (lifetimes is not None and five + hour == total):
        return Writes(five_minutes=five, one_hour=hour)
    if lifetimes is not None:
        counts.alarm(ProblemCode.WRITES_DISAGREE, f"lifetimes sum to {five + hour}, the total is {total}")
    if five + hour > total:
        return Writes(five_minutes=five, one_hour=hour).at_most(total)
    return Writes(five_minutes=total - hour, one_hour=hour)


_ANTHROPIC_INPUT_SIDE = (
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "cache_creation",
)


def anthropic_stream_usage(start: Json | None, delta: Json | None) -> UsageReading:
    """Read a Messages stream: ``message_start`` has the input side, ``message_delta`` the final output.

    Some servers tell the cache fields only in the delta, others send zeros there for what stood in the start. So the
    input side comes from the delta where that tells anything but zero, else from the start; it is never added up.
    One stream gives one reading, however many deltas it had: pass what they told together, later counts over earlier.
    """
    merged: dict[str, object] = dict(start or {})
    later = {field: value for field, value in (delta or {}).items() if value is not None}
    tells_input = any(later.get(field) for field in _ANTHROPIC_INPUT_SIDE)
    merged |= {field: value for field, value in later.items() if tells_input or field not in _ANTHROPIC_INPUT_SIDE}
    return anthropic_usage(merged or None)


def gemini_usage(usage: Json | None) -> UsageReading:
    """Read Gemini's ``usageMetadata``: thoughts stand beside the candidates, tool results beside the prompt.

    Its JSON leaves out zeros, so in a present object an absent count is 0; only the prompt count must be there.
    """
    counts = Counts()
    prompt = counts.read(usage, "promptTokenCount")
    if usage is None or prompt is None:
        return counts.close(prompt=None, output=None)
    prompt += counts.read(usage, "toolUsePromptTokenCount") or 0
    thoughts = counts.read(usage, "thoughtsTokenCount") or 0
    output = (counts.read(usage, "candidatesTokenCount") or 0) + thoughts
    counts.check_total(counts.read(usage, "totalTokenCount"), prompt + output)
    cached = counts.read(usage, "cachedContentTokenCount") or 0
    return counts.close(prompt=prompt, output=output, cached=cached, reasoning=thoughts)


def ollama_usage(answer: Json | None) -> UsageReading:
    """Read Ollama's own API. Some versions leave the prompt count out on a hit: then it is missing, not 0."""
    counts = Counts()
    return counts.close(
        prompt=counts.read(answer, "prompt_eval_count"),
        output=counts.read(answer, "eval_count"),
        cached=counts.read(answer, "prompt_eval_cached_count"),
    )


def recovered_usage(
    prompt_tokens: int | None, output_tokens: int, predicted: tuple[int, int, int, int] | None = None
) -> UsageReading:
    """Count an answer that ended without a usage object, from what the gateway saw of it.

    ``predicted`` are the hits (device, host, disk, pool) that the index expected; without them all prompt tokens count
    as fresh. With no prompt count the reading is ``MISSING``.
    """
    tiers = None if predicted is None else TierHits(*predicted).at_most(prompt_tokens or 0)
    reading = Counts().close(prompt=prompt_tokens, output=output_tokens, tiers=tiers, source=UsageSource.RECOVERED)
    if predicted is None or reading.usage.source is UsageSource.MISSING:
        return reading
    return UsageReading(replace(reading.usage, hit_source=HitSource.INFERRED), reading.problems)


def with_output_of(reading: UsageReading, seen_tokens: int) -> UsageReading:
    """Return the counts of an answer that was cut, with the output that was seen of it instead of what was counted so
    far: Messages say one token where a stream begins, and how many there were only at its end."""
    usage = replace(reading.usage, output_tokens=seen_tokens, source=UsageSource.RECOVERED)
    return UsageReading(usage, reading.problems)


def with_inferred_tiers(usage: Usage, predicted: tuple[int, int, int, int]) -> Usage:
    """Spread hits whose tier the engine does not tell over the tiers that the index saw the prefix in.

    ``predicted`` are its hits (device, host, disk, pool). Every count that the engine gave stays: of a total all four
    may be parts, of what SGLang calls storage disk and pool alone. What the index cannot place stays unknown.
    """
    if usage.hit_source is HitSource.TOTAL:
        placed = TierHits(*predicted).at_most(usage.hit_unknown_tokens)
    elif usage.hit_source is HitSource.REPORTED and usage.hit_unknown_tokens:
        placed = TierHits(disk=predicted[2], pool=predicted[3]).at_most(usage.hit_unknown_tokens)
        if not placed.total:
            return usage
    else:
        return usage
    return replace(
        usage,
        hit_device_tokens=usage.hit_device_tokens + placed.device,
        hit_host_tokens=usage.hit_host_tokens + placed.host,
        hit_disk_tokens=usage.hit_disk_tokens + placed.disk,
        hit_pool_tokens=usage.hit_pool_tokens + placed.pool,
        hit_unknown_tokens=usage.hit_unknown_tokens - placed.total,
        hit_source=HitSource.INFERRED,
    )


def with_hits_of(answer: UsageReading, first: UsageReading) -> UsageReading:
    """Join the counts of an answer with the hits of the engine that had its prompt first.

    An engine that decodes what another one prefilled, or goes on with another one's answer, finds the prompt in its
    cache because the first one has just put it there; what was really cached is the first one's number. The output is
    that of the answer; what an API wrote anew to its cache on the way counts as fresh.
    """
    hits = first.usage
    counts = Counts()
    missing = UsageSource.MISSING in (answer.usage.source, hits.source)
    tiers = TierHits(
        hits.hit_device_tokens,
        hits.hit_host_tokens,
        hits.hit_disk_tokens,
        hits.hit_pool_tokens,
        hits.hit_unknown_tokens,
    )
    reading = counts.close(
        prompt=None if missing else answer.usage.prompt_tokens,
        output=None if missing else answer.usage.output_tokens,
        tiers=tiers,
        reasoning=answer.usage.reasoning_tokens,
        source=answer.usage.source,
    )
    problems = answer.problems + first.problems + reading.problems
    if missing:
        return UsageReading(reading.usage, problems)
    return UsageReading(replace(reading.usage, hit_source=hits.hit_source), problems)
