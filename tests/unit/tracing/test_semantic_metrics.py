"""The conventions' metrics follow from records, by the names of each generation."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.samples.agent_runs import agent_run, plain_record
from tracing.attributes import SemanticConventions
from tracing.record import Outcome, RequestRecord
from tracing.semantic_metrics import MAX_MODELS, SemanticMetrics

SERVER = {"gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"}
NEW = {
    "gen_ai.client.inference.duration", "gen_ai.client.inference.time_to_first_chunk",
    "gen_ai.client.inference.time_per_output_chunk", "gen_ai.client.inference.usage.input_tokens",
    "gen_ai.client.inference.usage.output_tokens", "gen_ai.client.inference.usage.cache_read.input_tokens",
    "gen_ai.client.inference.usage.cache_write.input_tokens", "gen_ai.client.inference.usage.reasoning.output_tokens",
    "gen_ai.invoke_agent.duration", "gen_ai.invoke_agent.inference_calls", "gen_ai.invoke_agent.tool_calls",
}  # fmt: skip
OLD = {
    "gen_ai.client.operation.duration", "gen_ai.client.operation.time_to_first_chunk",
    "gen_ai.client.operation.time_per_output_chunk", "gen_ai.client.token.usage",
}  # fmt: skip


def counted(records: list[RequestRecord], conventions: SemanticConventions) -> dict[str, list[object]]:
    reader = InMemoryMetricReader()
    metrics = SemanticMetrics([reader], conventions)
    previous = None
    for record in records:
        metrics.observe(record, previous)
        previous = record if record.tool_calls else None
    data = reader.get_metrics_data()
    metrics.close(5)
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


@pytest.mark.parametrize("conventions", list(SemanticConventions))
def test_names_are_those_of_the_generation(conventions: SemanticConventions) -> None:
    found = counted(agent_run(), conventions)
    assert found.keys() == SERVER | {"gen_ai.execute_tool.duration"} | (
        NEW if conventions is SemanticConventions.V0_1 else OLD
    )


def test_counts_are_the_records_own() -> None:
    records = agent_run()
    found = counted(records, SemanticConventions.V0_1)
    (read,) = found["gen_ai.client.inference.usage.cache_read.input_tokens"]
    (total,) = found["gen_ai.client.inference.usage.input_tokens"]
    assert read.value == sum(record.usage.hit_tokens for record in records)
    assert total.value == sum(record.usage.prompt_tokens for record in records)
    calls = found["gen_ai.invoke_agent.inference_calls"][0]
    assert calls.sum == len(records)  # the run's answers without tool calls end its invocations
    assert all(point.attributes["keepwarm.inferred"] is True for point in found["gen_ai.execute_tool.duration"])


def test_labels_are_bounded_and_failures_named() -> None:
    records = [plain_record(f"r{n}", served_model=f"m{n}") for n in range(MAX_MODELS + 40)]
    records.append(plain_record(outcome=Outcome.TRUNCATED, error="lost"))
    found = counted(records, SemanticConventions.V0_1)["gen_ai.server.request.duration"]
    models = {point.attributes["gen_ai.request.model"] for point in found}
    assert len(models) == MAX_MODELS + 1
    assert any(point.attributes.get("error.type") == "lost" for point in found)
