"""The metrics of the GenAI conventions, as a function of records: client, server and agent, in either generation.

Prometheus has the gateway's own names (``tracing.metrics``); these go with the spans, over OTLP, to a backend that
knows the conventions. They are made in the exporter's thread, so no request waits for them. Labels are bounded: models
only by names under which an instance answered.

What an agent's invocation is nobody tells a gateway: here it is a run's steps up to an answer that asks for no tool.
Tool times are inferred from the gaps between steps, upper bounds, and say so (``keepwarm.inferred``).

Sources: OpenTelemetry semantic conventions 1.41, semantic-conventions-genai 0.1 (both "Development").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource

from tracing.attributes import SemanticConventions, operation_of
from tracing.gaps import GapKind, gap_between
from tracing.record import RequestRecord, UsageSource

MAX_RUNS: Final = 4096
MAX_MODELS: Final = 64
_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)

Labels = Mapping[str, str | bool]


@dataclass(slots=True)
class _Invocation:
    started_ns: int
    inference_calls: int = 0
    tool_calls: int = 0


class SemanticMetrics:
    """Counts records by the conventions' names, in a meter provider of its own."""

    def __init__(
        self,
        readers: Sequence[MetricReader],
        conventions: SemanticConventions = SemanticConventions.V0_1,
        resource: Resource | None = None,
    ) -> None:
        self._provider = MeterProvider(readers, resource or Resource.create({}))
        self._is_new = conventions is SemanticConventions.V0_1
        meter = self._provider.get_meter("keepwarm")

        def seconds(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=buckets)

        client = "gen_ai.client.inference" if self._is_new else "gen_ai.client.operation"
        self._duration = seconds(f"{client}.duration", "Duration of a model call, as its engine's client")
        self._first_chunk = seconds(f"{client}.time_to_first_chunk", "Sending to the first chunk")
        self._per_chunk = seconds(f"{client}.time_per_output_chunk", "Each further chunk", _TOKEN_SECONDS)
        self._server_duration = seconds("gen_ai.server.request.duration", "Arrival to end")
        self._server_first = seconds("gen_ai.server.time_to_first_token", "Arrival to the first token")
        self._server_per_token = seconds("gen_ai.server.time_per_output_token", "Each further token", _TOKEN_SECONDS)
        self._tool = seconds("gen_ai.execute_tool.duration", "A tool call; inferred ones are upper bounds")
        self._invoke = seconds("gen_ai.invoke_agent.duration", "A run's steps up to an answer without tool calls")
        self._invoke_calls = meter.create_histogram("gen_ai.invoke_agent.inference_calls", "{call}", "Model calls")
        self._invoke_tools = meter.create_histogram("gen_ai.invoke_agent.tool_calls", "{call}", "Tool calls")
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens used", explicit_bucket_boundaries_advisory=_TOKENS
        )
        usage = "gen_ai.client.inference.usage"
        self._counters = {
            name: meter.create_counter(f"{usage}.{name}", "{token}", "Tokens used")
            for name in ("input_tokens", "output_tokens", "cache_read.input_tokens", "cache_write.input_tokens",
                         "reasoning.output_tokens")
        }  # fmt: skip
        self._models: set[str] = set()
        self._runs: OrderedDict[tuple[str, str], _Invocation] = OrderedDict()

    def observe(self, record: RequestRecord, previous: RequestRecord | None) -> None:
        """Count one finished request, and the tools that ran since the step before."""
        labels = self._labels(record)
        self._times(record, labels)
        if record.usage.source is UsageSource.ENGINE:
            self._usage(record, labels)
        gap = None if previous is None else gap_between(previous, record)
        if gap is not None and gap.kind is GapKind.TOOL:
            for call in gap.calls:
                named: Labels = {"gen_ai.tool.name": call.name[:64], "keepwarm.inferred": True}
                self._tool.record(gap.duration_ns / 1e9, dict(named))
        self._invocation(record, len(gap.calls) if gap is not None else 0)

    def flush(self, timeout_s: float) -> bool:
        """Send what was counted; whether that was done in time."""
        return self._provider.force_flush(timeout_s * 1000)

    def close(self, timeout_s: float) -> None:
        """Send what was counted and stop."""
        self._provider.shutdown(timeout_s * 1000)

    def _labels(self, record: RequestRecord) -> dict[str, str]:
        model = record.served_model or "none"
        if model not in self._models:
            if len(self._models) >= MAX_MODELS or not record.attempts:
                model = "other"
            else:
                self._models.add(model)
        labels = {
            "gen_ai.operation.name": operation_of(record),
            "gen_ai.provider.name": "keepwarm",
            "gen_ai.request.model": model,
        }
        if record.outcome != "ok":
            labels["error.type"] = record.error or record.outcome.value
        return labels

    def _times(self, record: RequestRecord, labels: dict[str, str]) -> None:
        stamps = record.stamps
        self._server_duration.record((stamps.closed_ns - stamps.arrived_ns) / 1e9, labels)
        if record.attempts:
            last = record.attempts[-1]
            self._duration.record((last.ended_ns - last.started_ns) / 1e9, labels)
        if stamps.first_token_ns is None or not record.stream:
            return
        self._server_first.record((stamps.first_token_ns - stamps.arrived_ns) / 1e9, labels)
        if stamps.sent_ns is not None:
            self._first_chunk.record((stamps.first_token_ns - stamps.sent_ns) / 1e9, labels)
        further = record.usage.output_tokens - 1
        if stamps.last_token_ns is not None and further > 0:
            each_s = (stamps.last_token_ns - stamps.first_token_ns) / 1e9 / further
            self._server_per_token.record(each_s, labels)
            self._per_chunk.record(each_s, labels)

    def _usage(self, record: RequestRecord, labels: dict[str, str]) -> None:
        usage = record.usage
        counts = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "cache_read.input_tokens": usage.hit_tokens,
            "cache_write.input_tokens": usage.written_tokens,
            "reasoning.output_tokens": usage.reasoning_tokens,
        }
        if self._is_new:
            for name, tokens in counts.items():
                self._counters[name].add(tokens, labels)
            return
        self._tokens.record(usage.prompt_tokens, {**labels, "gen_ai.token.type": "input"})
        self._tokens.record(usage.output_tokens, {**labels, "gen_ai.token.type": "output"})

    def _invocation(self, record: RequestRecord, tools: int) -> None:
        link = record.link
        if link is None or not self._is_new:
            return
        key = (record.identity.tenant, link.run_id)
        run = self._runs.setdefault(key, _Invocation(record.stamps.arrived_ns))
        self._runs.move_to_end(key)
        run.inference_calls += 1
        run.tool_calls += tools
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        if record.outcome == "ok" and not record.tool_calls:
            labels = {"gen_ai.provider.name": "keepwarm"}
            self._invoke.record((record.stamps.closed_ns - run.started_ns) / 1e9, labels)
            self._invoke_calls.record(run.inference_calls, labels)
            self._invoke_tools.record(run.tool_calls, labels)
            del self._runs[key]
