"""Attribute names and values of spans: the GenAI conventions in two generations, OpenInference, and our own.

Sources: OpenTelemetry semantic conventions 1.41 (registry ``gen_ai``), semantic-conventions-genai 0.1, OpenInference
0.1.42. What neither generation has a name for (tiers, money, run links) lives under ``keepwarm.``. A run id that we
inferred is never a ``gen_ai.conversation.id``: the conventions reserve that for ids that the client gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from tracing.record import Charge, RequestRecord, Usage

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, AttributeValue]

MAX_TEXT_CHARS: Final = 256
_INT64: Final = 2**63


class SemanticConventions(StrEnum):
    """Which generation of the GenAI names spans use."""

    V0_1 = "0.1"  # semantic-conventions-genai
    V1_41 = "1.41"  # the last generation inside the core conventions


_CACHE_WRITE: Final = {
    SemanticConventions.V0_1: "gen_ai.usage.cache_write.input_tokens",
    SemanticConventions.V1_41: "gen_ai.usage.cache_creation.input_tokens",
}
_OPERATIONS: Final = {"chat": "chat", "completions": "text_completion", "responses": "chat", "messages": "chat"}


def operation_of(record: RequestRecord) -> str:
    """The GenAI operation name of the request's endpoint."""
    return _OPERATIONS.get(record.endpoint, record.endpoint)


def clean(attributes: Mapping[str, AttributeValue | None]) -> Attributes:
    """Only what every exporter can encode: no ``None``, text bounded and valid Unicode, integers of 64 bits.

    One span that can't be encoded would take its whole batch with it.
    """
    return {clean_text(name): _clean(value) for name, value in attributes.items() if value is not None}


def inference_attributes(record: RequestRecord, conventions: SemanticConventions) -> dict[str, AttributeValue | None]:
    """GenAI attributes of the attempt that answered; both generations count cache reads and writes as input."""
    usage, stamps = record.usage, record.stamps
    first_chunk = None
    if record.stream and stamps.first_token_ns is not None and stamps.sent_ns is not None:
        first_chunk = (stamps.first_token_ns - stamps.sent_ns) / 1e9
    return {
        **request_attributes(record),
        "gen_ai.response.model": record.served_model or None,
        "gen_ai.response.finish_reasons": (record.finish_reason,) if record.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": first_chunk,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.hit_tokens,
        _CACHE_WRITE[conventions]: usage.written_tokens or None,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens or None,
    }


def request_attributes(record: RequestRecord) -> dict[str, AttributeValue | None]:
    """GenAI attributes of any attempt, whether it answered or not."""
    link = record.link
    return {
        "gen_ai.operation.name": operation_of(record),
        "gen_ai.provider.name": "keepwarm",
        "gen_ai.request.model": record.model or None,
        "gen_ai.request.stream": record.stream,
        "gen_ai.agent.name": record.labels.get("agent"),
        "gen_ai.conversation.id": link.conversation_id if link is not None else None,
    }


def openinference_attributes(record: RequestRecord) -> dict[str, AttributeValue | None]:
    """The same numbers by the names that Phoenix and its relatives read."""
    usage, charge = record.usage, record.charge
    dollars = charge.amount_nano / 1e9 if charge.amount_nano is not None and charge.currency == "USD" else None
    return {
        "openinference.span.kind": "LLM",
        "llm.model_name": record.model or None,
        "llm.token_count.prompt": usage.prompt_tokens,
        "llm.token_count.completion": usage.output_tokens,
        "llm.token_count.total": usage.total_tokens,
        "llm.token_count.prompt_details.cache_read": usage.hit_tokens,
        "llm.token_count.prompt_details.cache_write": usage.written_tokens or None,
        "llm.cost.total": dollars,
        "session.id": record.link.run_id if record.link else None,
    }


def gateway_attributes(record: RequestRecord) -> dict[str, AttributeValue | None]:
    """What only we know: who asked, which run and on what evidence, tokens by tier, and the exact money."""
    link = record.link
    values: dict[str, AttributeValue | None] = {
        "keepwarm.request.id": record.request_id,
        "keepwarm.tenant": record.identity.tenant,
        "keepwarm.team": record.identity.team,
        "keepwarm.key.id": record.identity.key_id,
        "keepwarm.outcome": record.outcome.value,
        "keepwarm.instance": record.instance,
        "keepwarm.cache.salted": record.salted,
    }
    if link is not None:
        values |= {
            "keepwarm.run.id": link.run_id,
            "keepwarm.run.step": link.step,
            "keepwarm.run.link.method": link.method,
            "keepwarm.run.link.confidence": link.confidence,
            "keepwarm.run.parent.id": link.parent_run_id,
            "keepwarm.run.parent.request.id": link.parent_request_id,
            "keepwarm.run.parent.tool_call.id": link.parent_call_id,
        }
    values |= {f"keepwarm.label.{name}": text for name, text in record.labels.items()}
    return values | _usage_attributes(record.usage) | _cost_attributes(record.charge)


def _usage_attributes(usage: Usage) -> dict[str, AttributeValue | None]:
    return {
        "keepwarm.usage.source": usage.source.value,
        "keepwarm.usage.hit_source": usage.hit_source.value,
        "keepwarm.usage.fresh_tokens": usage.fresh_tokens,
        "keepwarm.usage.hit_device_tokens": usage.hit_device_tokens,
        "keepwarm.usage.hit_host_tokens": usage.hit_host_tokens,
        "keepwarm.usage.hit_disk_tokens": usage.hit_disk_tokens,
        "keepwarm.usage.hit_pool_tokens": usage.hit_pool_tokens,
        "keepwarm.usage.hit_unknown_tokens": usage.hit_unknown_tokens,
        "keepwarm.usage.output_tokens": usage.output_tokens,
    }


def _cost_attributes(charge: Charge) -> dict[str, AttributeValue | None]:
    values: dict[str, AttributeValue | None] = {
        "keepwarm.cost.currency": charge.currency,
        "keepwarm.cost.price_version": charge.price_version,
        "keepwarm.cost.amount_nano": charge.amount_nano,
        "keepwarm.cost.saved_nano": charge.saved_nano,
        "keepwarm.cost.unpriced_reason": charge.unpriced_reason,
    }
    lines: dict[str, int] = {}
    for line in charge.lines:
        name = f"keepwarm.cost.{line.token_class}_nano"
        values[name] = lines[name] = lines.get(name, 0) + line.amount_nano
    return values


def _clean(value: AttributeValue) -> AttributeValue:
    if isinstance(value, tuple):
        return tuple(clean_text(item) for item in value[:16])
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return str(value)
    return value


def clean_text(text: str) -> str:
    """Bounded and valid Unicode."""
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8")
