from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.samples.agent_runs import agent_run, plain_record
from tracing.metrics import Metrics, MetricsOptions
from tracing.record import Charge, Outcome, Usage


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def total(metrics: Metrics, name: str, **labels: str) -> float:
    found = samples(metrics).items()
    return sum(value for (sample, with_), value in found if sample == name and labels.items() <= dict(with_).items())


def test_counters_equal_the_records_exactly() -> None:
    metrics = Metrics()
    records = agent_run()
    for record in records:
        metrics.observe(record)
    assert total(metrics, "keepwarm_requests_total", outcome="ok") == len(records)
    assert total(metrics, "keepwarm_cost_nano_total") == sum(record.charge.amount_nano for record in records)
    assert total(metrics, "keepwarm_saved_nano") == sum(record.charge.saved_nano for record in records)
    for token_class, expected in (
        ("fresh", sum(record.usage.fresh_tokens for record in records)),
        ("hit_disk", sum(record.usage.hit_disk_tokens for record in records)),
        ("hit_pool", sum(record.usage.hit_pool_tokens for record in records)),
        ("output", sum(record.usage.output_tokens for record in records)),
    ):
        assert expected
        assert total(metrics, "keepwarm_tokens_total", token_class=token_class) == expected
    assert total(metrics, "keepwarm_ttft_seconds_count") == len(records)
    assert total(metrics, "keepwarm_ttft_seconds_count", hit="false") == 1
    assert total(metrics, "keepwarm_attempts_total", result="none", instance="engine-a") == 1
    assert total(metrics, "keepwarm_predicted_hit_tokens_total") == sum(
        record.decision.predicted_hit_tokens for record in records
    )


def test_an_unpriced_request_is_counted_and_adds_no_money() -> None:
    metrics = Metrics()
    metrics.observe(plain_record(charge=Charge("USD", "v", unpriced_reason="no price")))
    assert total(metrics, "keepwarm_unpriced_requests_total") == 1
    assert total(metrics, "keepwarm_cost_nano_total") == 0


def test_a_hit_that_costs_more_than_computing_lowers_the_saving() -> None:
    metrics = Metrics()
    metrics.observe(plain_record(charge=Charge("USD", "v", amount_nano=10, saved_nano=-4)))
    assert total(metrics, "keepwarm_saved_nano") == -4


def test_the_number_of_series_does_not_grow_with_what_clients_send() -> None:
    metrics = Metrics(MetricsOptions(max_models=4, max_instances=4))
    for number in range(500):
        rejected = {"outcome": Outcome.REJECTED, "status": 404, "attempts": (), "usage": Usage()}
        name = f"typed-{number}"
        metrics.observe(plain_record(f"r{number}", model=name, served_model=name, **rejected))
    series = len(samples(metrics))
    for number in range(500):
        metrics.observe(plain_record(f"s{number}", served_model=f"model-{number}"))
    models = {dict(labels)["model"] for _, labels in samples(metrics) if "model" in dict(labels)}
    assert models == {"none", "other", *(f"model-{number}" for number in range(4))}
    assert series < 100
    assert "typed" not in metrics.render().decode()


def test_two_registries_do_not_meet() -> None:
    one, two = Metrics(), Metrics()
    one.observe(plain_record())
    assert total(two, "keepwarm_requests_total") == 0
