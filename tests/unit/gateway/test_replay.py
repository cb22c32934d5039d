from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from billing.prices import PriceBook
from gateway.commands import replay
from gateway.replay.measures import Objectives, Summary, counted, summarize
from gateway.replay.performance import PRESETS, EnginePerformance
from gateway.replay.pricing import Pricing, price
from gateway.replay.router import Learning, RouterOptions
from gateway.replay.separation import separate
from gateway.replay.simulation import FleetOptions, LoadOptions, Replayed, Simulation, load_for_share
from gateway.replay.workload import Workload, infinite_hits, load_workload
from gateway.routing import POLICIES
from kvstore.page import Tier
from radix_index.naive import NaiveIndex
from tests import make_traces

TRACES = Path(make_traces.__file__).parent / "traces"
SMALL = replace(PRESETS["llama8b-h100"], device_tokens=24_000)


@cache
def agents() -> Workload:
    return load_workload(TRACES / "agents.rst.gz")


@cache
def chat() -> Workload:
    return load_workload(TRACES / "chat.jsonl")


def play(
    workload: Workload,
    policy: str = "expected-ttft",
    performance: EnginePerformance = SMALL,
    *,
    instances: int = 3,
    pool_tokens: int = 0,
    seed: int = 0,
    delay_s: float = 0.05,
    learning: Learning = Learning.EVENTS,
    speed: float = 1.0,
) -> Replayed:
    fleet = FleetOptions(performance, instances, pool_tokens)
    load = LoadOptions(users=6, seed=seed, speed=speed, gap_s=2.0)
    return Simulation(workload, fleet, load, RouterOptions(policy, learning, delay_s, seed)).run()


def summary_of(replayed: Replayed) -> Summary:
    return summarize(replayed, Objectives(), None, 0.0)


def tiered(host: int = 40_000, disk: int = 60_000) -> EnginePerformance:
    return replace(SMALL, device_tokens=16_000, host_tokens=host, disk_tokens=disk)


def test_the_traces_are_what_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_traces, "FOLDER", tmp_path)
    make_traces.main()
    for name in ("agents.rst.gz", "chat.jsonl"):
        assert (tmp_path / name).read_bytes()[10:] == (TRACES / name).read_bytes()[10:]  # gzip's header names the OS


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("workload", [agents, chat])
def test_every_request_ends_once_and_everything_is_given_back(workload: object, policy: str) -> None:
    trace: Workload = workload()  # type: ignore[operator]
    replayed = play(trace, policy, tiered(), pool_tokens=30_000, speed=2.0)
    replayed.router.check()
    assert sorted(flight.request.number for flight in replayed.flights) == list(range(len(trace.requests)))
    for engine in replayed.engines:
        engine.check()
        assert engine.next_event_s() is None
    for flight in replayed.flights:
        assert flight.arrived_s <= flight.started_s < flight.first_token_s <= flight.finished_s
        assert 0 <= sum(flight.hit_tokens) < flight.request.prompt_tokens


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    def outcome(seed: int) -> list[tuple[int, str, float, float]]:
        flights = play(agents(), seed=seed, performance=tiered()).flights
        return [(f.request.number, f.instance, f.first_token_s, f.finished_s) for f in flights]

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_hits_more_than_an_infinite_cache(policy: str) -> None:
    for workload in (agents(), chat()):
        replayed = play(workload, policy, tiered(), pool_tokens=50_000)
        bounds = infinite_hits(workload, [flight.request for flight in replayed.flights])
        for flight, bound in zip(replayed.flights, bounds, strict=True):
            assert sum(flight.hit_tokens) <= bound


def test_an_instance_that_forgets_nothing_reaches_the_bound() -> None:
    replayed = play(agents(), performance=replace(SMALL, device_tokens=10**7), instances=1)
    summary = summary_of(replayed)
    assert summary.of_bound > 0.97  # the rest: two requests with a new prefix under way at once
    assert summary.bound_hit_share > 0.5


def test_more_capacity_never_lowers_the_bound_and_tiers_raise_the_hits() -> None:
    sizes = [replace(SMALL, device_tokens=tokens) for tokens in (14_000, 24_000, 60_000, 10**7)]
    summaries = [summary_of(play(chat(), performance=size)) for size in sizes]
    bounds = [summary.bound_hit_share for summary in summaries]
    assert bounds == sorted(bounds)
    assert summaries[-1].hit_share > summaries[0].hit_share
    lower = summary_of(play(chat(), performance=replace(tiered(10**6, 0), device_tokens=14_000)))
    assert lower.hit_share > summaries[0].hit_share
    assert lower.tier_hit_shares["host"] > 0
    assert lower.tiers["host"].fetch_s < lower.tiers["host"].recompute_s


def test_prefix_routing_beats_round_robin_on_agents() -> None:
    ours, theirs = (summary_of(play(agents(), policy)) for policy in ("expected-ttft", "round-robin"))
    assert ours.hit_share > theirs.hit_share + 0.1
    assert ours.ttft_s.mean < theirs.ttft_s.mean


def test_a_shared_pool_is_read_by_instances_that_did_not_write_it() -> None:
    replayed = play(agents(), "round-robin", replace(SMALL, pool_bytes_per_s=50e9), pool_tokens=10**6)
    assert summary_of(replayed).tier_hit_shares["pool"] > 0.05
    assert sum(f.hit_tokens[Tier.POOL] > 0 for f in replayed.flights) > 5


def test_a_slow_link_is_declined_and_a_fast_one_is_used() -> None:
    fast, slow = (replace(tiered(), host_bytes_per_s=speed, disk_tokens=0) for speed in (50e9, 1e6))
    used, declined = (summary_of(play(agents(), "round-robin", p)).tiers["host"] for p in (fast, slow))
    assert used.hit_tokens > 0
    assert declined.hit_tokens == 0
    assert declined.declined_tokens > 0


def test_what_is_evicted_while_a_request_waits_is_fetched_again() -> None:
    slow = replace(tiered(10**6, 0), device_tokens=12_000, compute_efficiency=0.02)  # so that a queue forms
    summary = summary_of(play(agents(), performance=slow, instances=1))
    assert summary.of_bound > 0.99
    assert summary.wasted_fetch_tokens == 0


def test_predictions_route_nearly_as_well_as_events() -> None:
    events = summary_of(play(agents()))
    predicted = play(agents(), learning=Learning.PREDICTED)
    summary = summary_of(predicted)
    assert summary.hit_share > 0.9 * events.hit_share
    stats = [prediction.stats for prediction in predicted.router.predictions.values()]
    assert sum(s.answers for s in stats) == len(agents().requests)
    for prediction in predicted.router.predictions.values():
        prediction.check()


def test_late_events_mislead_the_router() -> None:
    prompt, late = (summary_of(play(agents(), delay_s=delay)) for delay in (0.0, 30.0))
    assert late.prediction.exact_share < prompt.prediction.exact_share


def test_the_index_decides_as_the_naive_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def choices() -> list[str]:
        return [flight.instance for flight in play(agents(), performance=tiered(), pool_tokens=30_000).flights]

    ours = choices()
    monkeypatch.setattr("gateway.replay.simulation.RadixIndex", lambda byte_budget: NaiveIndex())
    assert choices() == ours


def test_a_prompt_larger_than_the_device_is_refused_and_given_back() -> None:
    replayed = play(agents(), performance=replace(SMALL, device_tokens=6_000))
    refused = [flight for flight in replayed.flights if flight.was_refused]
    replayed.router.check()
    assert 0 < len(refused) < len(replayed.flights) == len(agents().requests)
    assert not any(flight.was_refused for flight in counted(replayed.flights))


def test_a_lone_request_takes_what_the_formulas_say() -> None:
    performance = replace(SMALL, device_tokens=10**6)
    flight = play(chat(), performance=performance, instances=1, speed=1e-6).flights[0]
    request = flight.request
    assert flight.ttft_s == pytest.approx(performance.prefill_s(request.prompt_tokens, 0))
    context = request.prompt_tokens + request.output_tokens / 2
    assert flight.tpot_s == pytest.approx(performance.decode_step_s(1, context))


def test_clocks_far_from_zero_do_not_stop_the_simulation() -> None:
    flights = play(chat(), speed=1e-9).flights
    assert len(flights) == len(chat().requests)
    assert all(flight.finished_s >= flight.first_token_s >= flight.arrived_s for flight in flights)


def test_hotter_load_costs_latency_and_the_share_sets_it() -> None:
    fleet, base = FleetOptions(SMALL, 3), LoadOptions()
    (light, one), (heavy, _) = (load_for_share(chat(), fleet, share, base) for share in (0.2, 0.8))
    assert heavy == pytest.approx(4 * light)
    assert one == 1
    assert load_for_share(agents(), fleet, 0.8, base)[1] > load_for_share(agents(), fleet, 0.2, base)[1]
    fast, slow = (summary_of(play(chat(), speed=speed)) for speed in (heavy * 3, light))
    assert fast.ttft_s.p90 > slow.ttft_s.p90
    assert fast.good_share <= slow.good_share


def test_separation_follows_the_work_and_the_objective() -> None:
    flights = play(chat()).flights
    plan = separate(flights, SMALL, 10.0, 0.1)
    assert plan.prefill_instances == pytest.approx(sum(f.prefill_s for f in flights) / 10)
    assert plan.decode_instances is not None
    assert plan.prefill_per_decode == pytest.approx(plan.prefill_instances / plan.decode_instances)
    tight = separate(flights, SMALL, 10.0, 0.0095)
    assert tight.decode_batch < plan.decode_batch
    assert tight.decode_instances is not None
    assert tight.decode_instances > plan.decode_instances
    assert separate(flights, SMALL, 10.0, 1e-6).decode_instances is None


def test_costs_come_from_the_meter_and_hits_save() -> None:
    book = PriceBook.default()
    ours, theirs = (
        price(counted(play(agents(), policy).flights), Pricing(book, "default", 0))
        for policy in ("expected-ttft", "round-robin")
    )
    assert ours.saved_nano > theirs.saved_nano > 0
    assert ours.price_version == book.version
    flights = counted(play(agents()).flights)
    assert price(flights, Pricing(book, "unheard-of", 0)).unpriced == {"no_price": len(flights)}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    status = replay.run(parser.parse_args(words))
    output = capsys.readouterr()
    return status, output.out, output.err


def test_the_command_prints_a_table_writes_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "r.json", tmp_path / "p.svg"
    words = (str(TRACES / "agents.rst.gz"), "--instances", "3", "--policy", "all", "--device-tokens", "24k")
    words += ("--users", "6", "--host-bytes", "4GB", "--prices", "default", "--price-model", "default")
    status, shown, _ = run(capsys, *words, "--json", str(report), "--picture", str(picture))
    assert status == 0
    for word in ("of bound %", "TTFT p50", "goodput", "prefill : decode", "declined", "decision us", "cost USD"):
        assert word in shown
    first = json.loads(report.read_text())
    assert [policy["policy"] for policy in first["policies"]] == list(POLICIES)
    assert first["fleet"]["performance"]["host_tokens"] == 4 * 10**9 // 131_072
    drawn = ElementTree.fromstring(picture.read_text())
    assert len(drawn.findall("{*}polyline")) == len(POLICIES)
    run(capsys, *words, "--json", str(report))
    second = json.loads(report.read_text())
    for policy in (*first["policies"], *second["policies"]):
        assert policy.pop("measured")["decision_us"]["p50"] > 0
    assert first == second


def test_json_to_the_terminal_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = run(capsys, str(TRACES / "chat.jsonl"), "--load", "0.3", "--json", "-")
    assert status == 0
    assert json.loads(shown)["trace"]["format"] == "mooncake"


def test_of_a_single_request_rates_are_by_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, report = tmp_path / "one.jsonl", tmp_path / "r.json"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}\n')
    status, _, _ = run(capsys, str(trace), "--json", str(report))
    assert status == 0
    (found,) = json.loads(report.read_text())["policies"]
    assert found["goodput_per_s"] == pytest.approx(1 / found["simulated_s"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("chat.jsonl", "--policy", "best"), "there is no policy 'best'"),
        (("chat.jsonl", "--users", "3"), "open"),
        (("agents.rst.gz", "--speed", "3"), "closed"),
        (("agents.rst.gz", "--set", "wings=2"), "no such parameter"),
        (("agents.rst.gz", "--set", "layers=x"), "no number"),
        (("agents.rst.gz", "--set", "chunk_tokens=0"), "above 0"),
        (("agents.rst.gz", "--set", "flop_per_s=0"), "above 0"),
        (("agents.rst.gz", "--index-bytes", "1"), "262,144 at least"),
        (("agents.rst.gz", "--json", "/no/such/folder/x.json"), "cannot be written"),
        (("agents.rst.gz", "--picture", "/no/such/folder/x.svg"), "cannot be written"),
        (("agents.rst.gz", "--picture", "x.png"), "ends in .svg"),
        (("agents.rst.gz", "--picture", "x"), "ends in .svg"),
        (("agents.rst.gz", "--json", "./agents.rst.gz"), "is the trace itself"),
        (("agents.rst.gz", "--json", "x.svg", "--picture", "./x.svg"), "name one file"),
        (("agents.rst.gz", "--run-ends"), "--run-ends is of a page store"),
        (("agents.rst.gz", "--store", "lfu", "--picture", "x.svg"), "nothing is drawn"),
        (("agents.rst.gz", "--starts-at", "2026-01-01"), "name a price book"),
        (("agents.rst.gz", "--device-tokens", "10"), "no request was served"),
        (("nowhere.rst.gz",), "nowhere.rst.gz: No such file"),
        (("agents.rst.gz", "--prices", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_what_makes_no_sense_is_told(
    words: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(TRACES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    status, _, told = run(capsys, *words)
    assert status == 1
    assert problem in told


@pytest.mark.parametrize("options", [(), ("--store", "lfu")])
def test_a_time_that_goes_back_is_warned_of_and_put_in_order(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"timestamp": %d, "input_length": 700, "output_length": 3, "hash_ids": [%d]}\n'
    trace, sorted_trace = tmp_path / "t.jsonl", tmp_path / "other" / "t.jsonl"
    sorted_trace.parent.mkdir()
    trace.write_text(line % (9000, 1) + line % (1000, 2) + line % (5000, 1))
    sorted_trace.write_text(line % (1000, 2) + line % (5000, 1) + line % (9000, 1))
    status, shown, told = run(capsys, str(trace), *options, "--json", "-")
    assert status == 0
    assert f"{trace}, line 2: the time goes back" in told
    status, expected, told = run(capsys, str(sorted_trace), *options, "--json", "-")
    assert (status, told) == (0, "")
    first, second = json.loads(shown), json.loads(expected)
    for policy in (*first.get("policies", ()), *second.get("policies", ())):
        policy.pop("measured")  # of this machine
    assert first == second


@pytest.mark.parametrize(
    ("text", "size"), [("12", 12), ("400k", 400_000), ("1.5TB", 1_500_000_000_000), ("2MiB", 2 << 20)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert replay.parse_size(text) == size


@pytest.mark.parametrize(
    "words",
    ["--instances 100000", "--instances 0", "--event-delay nan", "--event-delay -1", "--speed 0", "--load nan",
     "--think-limit -1", "--ttft-objective nan", "--users 0", "--store-sessions 0"],
)  # fmt: skip
def test_numbers_out_of_bounds_are_refused_by_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, "trace", *words.split())
    assert ended.value.code == 2
    assert words.split()[0] in capsys.readouterr().err


def test_a_line_that_is_nested_too_deeply_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    status, _, told = run(capsys, str(tmp_path / "deep.jsonl"))
    assert status == 1
    assert "line 1" in told


def test_a_loop_of_links_is_nothing_to_write_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    status, _, told = run(capsys, str(TRACES / "chat.jsonl"), "--load", "0.3", "--json", str(tmp_path / "loop"))
    assert (status, told.count("\n")) == (1, 1)


def test_a_word_is_no_size() -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        replay.parse_size("much")
