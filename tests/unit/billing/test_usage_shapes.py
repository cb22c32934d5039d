"""Each API's usage object, read into disjoint classes; the figures of known miscounts are among them."""

from __future__ import annotations

import pytest

from billing.counts import ProblemCode, UsageReading
from billing.usage import (
    anthropic_stream_usage,
    anthropic_usage,
    embeddings_usage,
    gemini_usage,
    llamacpp_usage,
    ollama_usage,
    openai_usage,
    recovered_usage,
    responses_usage,
    sglang_generate_usage,
    with_hits_of,
    with_inferred_tiers,
)
from tracing.record import HitSource, Usage, UsageSource


def codes(reading: UsageReading) -> list[ProblemCode]:
    return [problem.code for problem in reading.problems]


def chat(prompt: int, cached: int | None, output: int, **details: object) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, **details},
    }


class TestOpenAi:
    def test_cached_tokens_lie_inside_the_prompt(self) -> None:
        usage, problems = openai_usage(chat(2006, 1920, 300))
        assert (usage.fresh_tokens, usage.hit_unknown_tokens, usage.output_tokens) == (86, 1920, 300)
        assert usage.prompt_tokens == 2006
        assert usage.hit_source is HitSource.TOTAL
        assert problems == ()

    def test_cached_and_written_are_disjoint_parts_of_the_prompt(self) -> None:
        usage = openai_usage(chat(18_014, 0, 0, cache_write_tokens=18_011)).usage
        assert (usage.fresh_tokens, usage.hit_tokens, usage.write_tokens) == (3, 0, 18_011)

    def test_zero_hits_and_no_word_about_hits_differ(self) -> None:
        assert openai_usage(chat(100, 0, 5)).usage.hit_source is HitSource.TOTAL
        assert openai_usage(chat(100, None, 5)).usage.hit_source is HitSource.UNKNOWN
        silent = openai_usage({"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": None})
        assert silent.usage.hit_source is HitSource.UNKNOWN
        assert silent.usage.fresh_tokens == 100

    def test_silence_means_zero_for_an_engine_that_tells_every_hit(self) -> None:
        usage = openai_usage(chat(100, None, 5), None, silence_is_zero=True).usage
        assert (usage.fresh_tokens, usage.hit_source) == (100, HitSource.REPORTED)

    @pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 5}, {"completion_tokens": 5}])
    def test_a_missing_count_is_missing_and_not_zero(self, usage: dict[str, object] | None) -> None:
        reading = openai_usage(usage)
        assert reading.usage.source is UsageSource.MISSING
        assert ProblemCode.MISSING in codes(reading)

    @pytest.mark.parametrize("value", [-1, "12", 1.5, True, [3]])
    def test_what_is_no_count_is_an_alarm_and_missing(self, value: object) -> None:
        reading = openai_usage({"prompt_tokens": value, "completion_tokens": 1})
        assert codes(reading) == [ProblemCode.NOT_A_COUNT, ProblemCode.MISSING]

    def test_more_hits_than_prompt_is_clamped_with_an_alarm(self) -> None:
        reading = openai_usage(chat(2023, 3968, 10))
        assert reading.usage.hit_tokens == reading.usage.prompt_tokens == 2023
        assert codes(reading) == [ProblemCode.HITS_EXCEED_PROMPT]
        assert "3968" in str(reading.problems[0])

    def test_writes_that_overlap_hits_are_clamped_with_an_alarm(self) -> None:
        reading = openai_usage(chat(100, 80, 1, cache_write_tokens=30))
        assert (reading.usage.hit_tokens, reading.usage.write_tokens, reading.usage.fresh_tokens) == (80, 20, 0)
        assert codes(reading) == [ProblemCode.WRITES_EXCEED_PROMPT]

    def test_two_cache_fields_in_one_object_are_not_added(self) -> None:
        reading = openai_usage(chat(2459, 0, 10) | {"cache_read_input_tokens": 2455})
        assert (reading.usage.fresh_tokens, reading.usage.hit_tokens) == (4, 2455)
        assert codes(reading) == [ProblemCode.HITS_DISAGREE]

    def test_reasoning_lies_inside_the_output(self) -> None:
        usage = openai_usage(chat(10, 0, 1000) | {"completion_tokens_details": {"reasoning_tokens": 50}}).usage
        assert (usage.output_tokens, usage.reasoning_tokens) == (1000, 50)

    def test_reasoning_beside_the_output_is_told_by_the_total(self) -> None:
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": 7,
            "total_tokens": 67,
            "completion_tokens_details": {"reasoning_tokens": 50},
        }
        reading = openai_usage(usage)
        assert (reading.usage.output_tokens, reading.usage.reasoning_tokens, reading.problems) == (57, 50, ())

    def test_more_reasoning_than_output_is_clamped_with_an_alarm(self) -> None:
        reading = openai_usage({"prompt_tokens": 1, "completion_tokens": 5, "reasoning_tokens": 6})
        assert reading.usage.reasoning_tokens == 5
        assert codes(reading) == [ProblemCode.REASONING_EXCEEDS_OUTPUT]

    def test_parts_that_miss_the_total_are_an_alarm(self) -> None:
        assert codes(openai_usage(chat(10, 0, 5) | {"total_tokens": 16})) == [ProblemCode.TOTAL_DISAGREES]

    def test_deepseek_tells_hits_and_misses(self) -> None:
        usage = {"completion_tokens": 5, "prompt_cache_hit_tokens": 900, "prompt_cache_miss_tokens": 100}
        assert openai_usage(usage).usage.prompt_tokens == 1000
        reading = openai_usage(usage | {"prompt_tokens": 999})
        assert (reading.usage.hit_tokens, reading.usage.fresh_tokens) == (900, 99)
        assert codes(reading) == [ProblemCode.TOTAL_DISAGREES]

    def test_moonshot_tells_hits_beside_the_details(self) -> None:
        usage = openai_usage({"prompt_tokens": 100, "completion_tokens": 5, "cached_tokens": 64}).usage
        assert (usage.fresh_tokens, usage.hit_unknown_tokens) == (36, 64)

    def test_qwen_tells_creation_in_the_details(self) -> None:
        usage = openai_usage(chat(5000, 0, 5, cache_creation_input_tokens=4096)).usage
        assert (usage.fresh_tokens, usage.write_tokens) == (904, 4096)
        timed = openai_usage(chat(5000, 0, 5, cache_creation={"ephemeral_5m_input_tokens": 4096})).usage
        assert (timed.fresh_tokens, timed.write_5m_tokens) == (904, 4096)


class TestSglang:
    def tiers(self, usage: dict[str, object] | None, **details: object) -> UsageReading:
        return openai_usage(usage, {"cached_tokens_details": details})

    def test_hits_stand_in_the_tier_that_the_engine_names(self) -> None:
        reading = self.tiers(chat(1000, 900, 5), device=512, host=256, storage=132, disk=100, pool=32)
        usage = reading.usage
        assert (usage.hit_device_tokens, usage.hit_host_tokens, usage.hit_disk_tokens, usage.hit_pool_tokens) == (
            512,
            256,
            100,
            32,
        )
        assert (usage.hit_unknown_tokens, usage.fresh_tokens) == (0, 100)
        assert (usage.hit_source, reading.problems) == (HitSource.REPORTED, ())

    @pytest.mark.parametrize(
        ("backend", "field"),
        [("file", "hit_disk_tokens"), ("mooncake", "hit_pool_tokens"), (None, "hit_unknown_tokens")],
    )
    def test_storage_is_disk_or_pool_by_its_backend(self, backend: str | None, field: str) -> None:
        usage = self.tiers(chat(100, 64, 1), device=0, host=0, storage=64, storage_backend=backend).usage
        assert getattr(usage, field) == usage.hit_tokens == 64

    def test_tiers_alone_tell_the_hits_when_the_usage_is_silent(self) -> None:
        usage = self.tiers(chat(100, None, 1), device=48, host=16).usage
        assert (usage.fresh_tokens, usage.hit_tokens, usage.hit_source) == (36, 64, HitSource.REPORTED)

    def test_the_total_has_the_last_word_over_the_tiers(self) -> None:
        more = self.tiers(chat(100, 64, 1), device=48, host=0)
        assert (more.usage.hit_device_tokens, more.usage.hit_unknown_tokens) == (48, 16)
        less = self.tiers(chat(100, 50, 1), device=48, host=16)
        assert (less.usage.hit_device_tokens, less.usage.hit_host_tokens) == (48, 2)
        assert codes(more) == codes(less) == [ProblemCode.TIERS_DISAGREE]

    def test_disk_and_pool_beyond_the_storage_are_an_alarm(self) -> None:
        reading = self.tiers(chat(100, 64, 1), device=0, host=0, storage=50, disk=40, pool=24)
        assert codes(reading) == [ProblemCode.TIERS_DISAGREE]
        assert reading.usage.hit_tokens == 64

    def test_generate_meta_info(self) -> None:
        meta = {
            "prompt_tokens": 100,
            "completion_tokens": 4,
            "cached_tokens": 64,
            "cached_tokens_details": {"device": 64, "host": 0},
        }
        usage = sglang_generate_usage(meta).usage
        assert (usage.fresh_tokens, usage.hit_device_tokens, usage.output_tokens) == (36, 64, 4)


class TestOtherEngines:
    def test_llamacpp_timings_count_the_cached_beside_the_computed(self) -> None:
        timings = {"cache_n": 236, "prompt_n": 1, "predicted_n": 35}
        usage = llamacpp_usage(None, timings).usage
        assert (usage.fresh_tokens, usage.hit_tokens, usage.output_tokens, usage.prompt_tokens) == (1, 236, 35, 237)

    def test_llamacpp_timings_fill_in_hits_that_the_usage_lacks(self) -> None:
        timings = {"cache_n": 236, "prompt_n": 1, "predicted_n": 35}
        reading = llamacpp_usage({"prompt_tokens": 237, "completion_tokens": 35}, timings)
        assert (reading.usage.fresh_tokens, reading.usage.hit_tokens, reading.problems) == (1, 236, ())

    def test_llamacpp_usage_and_timings_that_disagree_are_an_alarm(self) -> None:
        reading = llamacpp_usage(chat(240, 236, 35), {"cache_n": 236, "prompt_n": 1, "predicted_n": 35})
        assert codes(reading) == [ProblemCode.TOTAL_DISAGREES]

    def test_ollama_without_a_prompt_count_is_missing(self) -> None:
        assert ollama_usage({"eval_count": 5}).usage.source is UsageSource.MISSING
        usage = ollama_usage({"eval_count": 5, "prompt_eval_count": 26, "prompt_eval_cached_count": 20}).usage
        assert (usage.fresh_tokens, usage.hit_tokens) == (6, 20)
        assert ollama_usage({"eval_count": 5, "prompt_eval_count": 26}).usage.hit_source is HitSource.UNKNOWN

    def test_embeddings_have_no_output(self) -> None:
        usage = embeddings_usage({"prompt_tokens": 8, "total_tokens": 8}).usage
        assert (usage.fresh_tokens, usage.output_tokens, usage.source) == (8, 0, UsageSource.ENGINE)
        assert embeddings_usage({"total_tokens": 8}).usage.fresh_tokens == 8
        assert embeddings_usage(None).usage.source is UsageSource.MISSING


class TestResponses:
    def test_cached_and_written_lie_inside_the_input(self) -> None:
        usage = {
            "input_tokens": 172_000,
            "input_tokens_details": {"cached_tokens": 155_000, "cache_write_tokens": 3_000},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 172_007,
        }
        reading = responses_usage(usage)
        assert reading.problems == ()
        assert (reading.usage.fresh_tokens, reading.usage.hit_tokens, reading.usage.write_tokens) == (
            14_000,
            155_000,
            3_000,
        )
        assert reading.usage.reasoning_tokens == 3

    def test_missing(self) -> None:
        assert responses_usage(None).usage.source is UsageSource.MISSING


class TestAnthropic:
    def test_input_read_and_creation_stand_beside_one_another(self) -> None:
        usage = {
            "input_tokens": 19,
            "cache_read_input_tokens": 35_000,
            "cache_creation_input_tokens": 4_000,
            "cache_creation": {"ephemeral_5m_input_tokens": 1_000, "ephemeral_1h_input_tokens": 3_000},
            "output_tokens": 5,
        }
        reading = anthropic_usage(usage)
        assert reading.problems == ()
        assert reading.usage.prompt_tokens == 39_019
        assert (reading.usage.fresh_tokens, reading.usage.write_5m_tokens, reading.usage.write_1h_tokens) == (
            19,
            1_000,
            3_000,
        )

    def test_creation_without_a_lifetime_lives_five_minutes(self) -> None:
        usage = anthropic_usage({"input_tokens": 3, "cache_creation_input_tokens": 12_304, "output_tokens": 550}).usage
        assert (usage.fresh_tokens, usage.write_5m_tokens) == (3, 12_304)

    def test_lifetimes_that_miss_the_total_are_an_alarm(self) -> None:
        creation = {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}
        base = {"input_tokens": 1, "output_tokens": 1, "cache_creation": creation}
        more = anthropic_usage(base | {"cache_creation_input_tokens": 40})
        assert (more.usage.write_5m_tokens, more.usage.write_1h_tokens) == (20, 20)
        less = anthropic_usage(base | {"cache_creation_input_tokens": 25})
        assert (less.usage.write_5m_tokens, less.usage.write_1h_tokens) == (10, 15)
        assert codes(more) == codes(less) == [ProblemCode.WRITES_DISAGREE]

    def test_a_read_beyond_the_input_is_ordinary(self) -> None:
        reading = anthropic_usage({"input_tokens": 3_602, "cache_read_input_tokens": 3_604, "output_tokens": 1})
        assert (reading.usage.fresh_tokens, reading.usage.hit_tokens, reading.problems) == (3_602, 3_604, ())

    def test_thinking_lies_inside_the_output(self) -> None:
        told = {"output_tokens": 550, "output_tokens_details": {"thinking_tokens": 200}}
        for usage in (
            anthropic_usage({"input_tokens": 3, **told}).usage,
            anthropic_stream_usage({"input_tokens": 3, "output_tokens": 1}, told).usage,
        ):
            assert (usage.output_tokens, usage.reasoning_tokens) == (550, 200)

    def test_stream_takes_the_input_from_the_start_and_the_output_from_the_delta(self) -> None:
        start = {"input_tokens": 6, "cache_creation_input_tokens": 159_217, "output_tokens": 1}
        usage = anthropic_stream_usage(start, {"output_tokens": 2_745}).usage
        assert (usage.fresh_tokens, usage.write_5m_tokens, usage.output_tokens) == (6, 159_217, 2_745)

    def test_stream_whose_delta_alone_tells_the_cache(self) -> None:
        delta = {"input_tokens": 3_602, "cache_read_input_tokens": 3_604, "output_tokens": 9}
        usage = anthropic_stream_usage({"input_tokens": 3_602, "output_tokens": 0}, delta).usage
        assert (usage.fresh_tokens, usage.hit_tokens) == (3_602, 3_604)

    def test_stream_whose_delta_repeats_the_input_as_zero(self) -> None:
        start = {"input_tokens": 100, "cache_read_input_tokens": 50, "output_tokens": 1}
        delta = {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 13}
        usage = anthropic_stream_usage(start, delta).usage
        assert (usage.fresh_tokens, usage.hit_tokens, usage.output_tokens) == (100, 50, 13)

    def test_stream_without_either(self) -> None:
        assert anthropic_stream_usage(None, None).usage.source is UsageSource.MISSING


class TestGemini:
    def test_thoughts_are_output_beside_the_candidates(self) -> None:
        usage = {
            "promptTokenCount": 262_960,
            "cachedContentTokenCount": 257_955,
            "candidatesTokenCount": 1_700,
            "thoughtsTokenCount": 44,
            "totalTokenCount": 264_704,
        }
        reading = gemini_usage(usage)
        assert reading.problems == ()
        assert (reading.usage.fresh_tokens, reading.usage.hit_tokens) == (5_005, 257_955)
        assert (reading.usage.output_tokens, reading.usage.reasoning_tokens) == (1_744, 44)

    def test_tool_results_are_prompt(self) -> None:
        usage = gemini_usage({"promptTokenCount": 10, "toolUsePromptTokenCount": 5, "totalTokenCount": 15}).usage
        assert (usage.prompt_tokens, usage.output_tokens) == (15, 0)

    def test_missing(self) -> None:
        assert gemini_usage(None).usage.source is UsageSource.MISSING
        assert gemini_usage({"candidatesTokenCount": 3}).usage.source is UsageSource.MISSING


class TestWithoutAWord:
    def test_recovered_counts_say_so(self) -> None:
        usage = recovered_usage(100, 7).usage
        assert (usage.source, usage.fresh_tokens, usage.output_tokens) == (UsageSource.RECOVERED, 100, 7)
        assert usage.hit_source is HitSource.UNKNOWN

    def test_recovered_with_predicted_hits(self) -> None:
        usage = recovered_usage(100, 7, (64, 16, 0, 64)).usage
        assert (usage.hit_device_tokens, usage.hit_host_tokens, usage.hit_pool_tokens) == (64, 16, 20)
        assert (usage.fresh_tokens, usage.hit_source) == (0, HitSource.INFERRED)

    def test_recovered_without_a_prompt_count_is_missing(self) -> None:
        assert recovered_usage(None, 7, (1, 0, 0, 0)).usage.source is UsageSource.MISSING

    def test_tiers_inferred_for_an_engine_that_tells_a_total(self) -> None:
        usage = with_inferred_tiers(openai_usage(chat(1000, 600, 5)).usage, (512, 0, 64, 0))
        assert (usage.hit_device_tokens, usage.hit_disk_tokens, usage.hit_unknown_tokens) == (512, 64, 24)
        assert (usage.hit_tokens, usage.hit_source) == (600, HitSource.INFERRED)
        told = Usage(hit_device_tokens=5, hit_source=HitSource.REPORTED)
        assert with_inferred_tiers(told, (0, 5, 0, 0)) is told

    @pytest.mark.parametrize(
        ("storage", "predicted", "placed"),
        [
            (192, (64, 0, 128, 64), (128, 64, 0)),
            (192, (0, 0, 128, 0), (128, 0, 64)),  # what the index did not know of stays unknown
            (96, (0, 0, 64, 64), (64, 32, 0)),  # the engine took less
        ],
    )
    def test_what_sglang_calls_storage_is_placed_on_disk_and_in_the_pool(
        self, storage: int, predicted: tuple[int, int, int, int], placed: tuple[int, int, int]
    ) -> None:
        details = {"cached_tokens_details": {"device": 32, "host": 16, "storage": storage, "storage_backend": "X"}}
        told = openai_usage(chat(1000, 48 + storage, 5), details).usage
        usage = with_inferred_tiers(told, predicted)
        assert (usage.hit_device_tokens, usage.hit_host_tokens) == (32, 16)
        assert (usage.hit_disk_tokens, usage.hit_pool_tokens, usage.hit_unknown_tokens) == placed
        assert (usage.hit_tokens, usage.hit_source) == (48 + storage, HitSource.INFERRED)
        assert with_inferred_tiers(told, (300, 300, 0, 0)) is told

    def test_separated_prefill_and_decode_bill_what_the_prefill_node_found(self) -> None:
        decode = openai_usage(chat(4609, 4608, 30))
        joined = with_hits_of(decode, openai_usage(chat(4609, 3072, 1)))
        assert (joined.usage.hit_tokens, joined.usage.fresh_tokens, joined.usage.output_tokens) == (3072, 1537, 30)
        assert joined.usage.hit_source is HitSource.TOTAL
        cold = with_hits_of(decode, openai_usage(chat(4609, 0, 1)))
        assert cold.usage.hit_tokens == 0
        assert with_hits_of(decode, openai_usage(None)).usage.source is UsageSource.MISSING
        seen = with_hits_of(recovered_usage(4609, 30), openai_usage(chat(4609, 3072, 1)))
        assert (seen.usage.hit_tokens, seen.usage.source) == (3072, UsageSource.RECOVERED)
