"""Engines without events: the gateway predicts what they hold, and learns from what their answers report."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.gateways import Client, gateway_for
from tests.scripted_engine import Asked, Json, Script, ScriptedEngine, answer, stream

BLOCK = 16
PROMPT = list(range(100, 100 + 10 * BLOCK + 3))


class LruEngine:
    """What a scripted engine pretends to hold: whole blocks of prompts, the ones used longest ago lost first."""

    def __init__(self, engine: ScriptedEngine, blocks: int) -> None:
        self.engine, self.blocks = engine, blocks
        engine.script_for = self.play
        self.used: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def serve(self, tokens: Sequence[int]) -> int:
        """Compute a prompt; return how many of its tokens were cached."""
        chain = [tuple(tokens[: end + BLOCK]) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        hits = next((n for n, block in enumerate(chain) if block not in self.used), len(chain))
        for block in reversed(chain):
            self.used[block] = None
            self.used.move_to_end(block)
        while len(self.used) > self.blocks:
            self.used.popitem(last=False)
        return min(hits, (len(tokens) - 1) // BLOCK) * BLOCK

    def play(self, asked: Asked) -> Script:
        """Answer as an engine that reports cached tokens does."""
        tokens, cached = asked.json["prompt"], self.serve(asked.json["prompt"])
        if asked.json.get("stream"):
            return Script(events=stream(["a", "b"], len(tokens), cached))
        return Script(body=answer("ab", len(tokens), 2, cached))


@asynccontextmanager
async def _gateway(home: Path, capacities: Sequence[int]) -> AsyncIterator[tuple[Client, list[LruEngine]]]:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        engines = [first, second][: len(capacities)]
        caches = [LruEngine(engine, blocks) for engine, blocks in zip(engines, capacities, strict=True)]
        instances: list[Json] = [
            {
                "id": f"e{n}",
                "url": cache.engine.url,
                "adapter": "openai",
                "capacity_tokens": cache.blocks * BLOCK,
            }
            for n, cache in enumerate(caches)
        ]
        models = [{"name": "m", "tokenizer": "none"}]
        async with gateway_for(engines, home, models=models, instances=instances) as client:
            yield client, caches


async def _sent(client: Client, tokens: Sequence[int] | str, **more: object) -> tuple[str, int, int, bool]:
    """Send a prompt; return the instance, the predicted and the reported hits, and whether that was called exact."""
    body = {"model": "m", "prompt": tokens if isinstance(tokens, str) else list(tokens), **more}
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        assert response.status == 200
        await response.read()
        record = await client.record(response.headers["x-keepwarm-request-id"])
    assert record.decision is not None
    return (
        record.decision.instance,
        record.decision.predicted_hit_tokens,
        record.usage.hit_tokens,
        record.decision.exact,
    )


async def _facts(client: Client, instance: str = "e0") -> Json:
    async with client.session.get(f"{client.url}/keepwarm/v1/instances") as response:
        return next(each for each in (await response.json())["instances"] if each["id"] == instance)


async def test_a_prompt_comes_back_to_where_it_was_computed(tmp_path: Path) -> None:
    async with _gateway(tmp_path, [64, 64]) as (client, _):
        first, predicted, reported, _ = await _sent(client, PROMPT)
        assert (predicted, reported) == (0, 0)
        for stream_it in (False, True):
            assert await _sent(client, PROMPT, stream=stream_it) == (first, 10 * BLOCK, 10 * BLOCK, False)
        other, *_ = await _sent(client, [7, *PROMPT])
        assert (await _sent(client, [7, *PROMPT]))[:3] == (other, 10 * BLOCK, 10 * BLOCK)
        facts = await _facts(client, first)
        assert facts["events"] is None
        assert facts["predicted"]["block_size"] == BLOCK
        assert facts["prediction"]["ids"]["exact_share"] == 1.0
        async with client.session.get(f"{client.url}/metrics") as response:
            text = await response.text()
        assert f'keepwarm_prediction_exact_share{{basis="ids",instance="{first}"}} 1.0' in text
        async with client.session.get(f"{client.url}/console/instances") as response:
            page = await response.text()
        assert "prediction, from what was routed there" in page
        assert "100%</b> exact" in page


async def test_what_was_evicted_is_no_longer_predicted_once_an_answer_tells(tmp_path: Path) -> None:
    async with _gateway(tmp_path, [24]) as (client, (cache,)):
        cache.blocks = 12  # half of what was declared
        await _sent(client, PROMPT)
        await _sent(client, [7, *PROMPT])
        assert (await _sent(client, PROMPT))[1:3] == (10 * BLOCK, 2 * BLOCK)
        capacity = (await _facts(client))["predicted"]["capacity_tokens"]
        assert 12 * BLOCK <= capacity < 24 * BLOCK
        score = (await _facts(client))["prediction"]["ids"]
        assert score == {
            "answers": 3,
            "exact_share": 0.6667,
            "mean_error_tokens": 42.7,
            "mean_absolute_error_tokens": 42.7,
        }
        pairs = [(await _sent(client, tokens))[1:3] for _ in range(4) for tokens in ([7, *PROMPT], PROMPT)]
        assert pairs[0] != (2 * BLOCK, 2 * BLOCK)  # learned by halves, since a flush would look the same for one answer
        assert pairs[-2:] == [(2 * BLOCK, 2 * BLOCK)] * 2


async def test_an_instance_that_was_gone_holds_nothing(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        cache = LruEngine(engine, 64)
        instances = [{"id": "e0", "url": engine.url, "adapter": "openai"}]
        models = [{"name": "m", "tokenizer": "none"}]
        async with gateway_for([engine], tmp_path, models=models, instances=instances) as client:
            await _sent(client, PROMPT)
            await engine.close()
            await client.until(lambda: client.gateway.fleet.instances["e0"].predicted is None)
            cache.used.clear()
            await engine.open()
            await client.until(lambda: client.gateway.fleet.instances["e0"].takes_requests)
            assert (await _sent(client, PROMPT))[1:3] == (0, 0)
            assert (await _facts(client))["prediction"]["ids"]["answers"] == 2


async def test_an_answer_from_a_former_life_teaches_nothing(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        gate = asyncio.Event()
        words = stream(["a", "b"], len(PROMPT))
        engine.script_for = lambda asked: Script(events=words, pause=lambda number: gate if number else None)
        instances = [{"id": "e0", "url": engine.url, "adapter": "openai"}]
        models = [{"name": "m", "tokenizer": "none"}]
        async with gateway_for([engine], tmp_path, models=models, instances=instances) as client:
            body = {"model": "m", "prompt": PROMPT, "stream": True}
            async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
                instance = client.gateway.fleet.instances["e0"]
                client.gateway.fleet._forget(instance)  # what a probe that finds nobody leads to
                gate.set()
                await response.read()
            await client.until(client.at_rest)
            assert client.gateway.index.stats().blocks == 0


async def test_text_gives_affinity_that_is_called_approximate(tmp_path: Path) -> None:
    async with _gateway(tmp_path, [64, 64]) as (client, caches):
        for cache in caches:  # what it tokenizes is not known here: 3 bytes a token, and all but the last was cached
            seen: set[str] = set()

            def play(asked: Asked, seen: set[str] = seen) -> Script:
                text = asked.json["prompt"]
                tokens = len(text) // 3
                cached = (tokens - 1) // BLOCK * BLOCK if text in seen else 0
                seen.add(text)
                return Script(body=answer("ab", tokens, 2, cached))

            cache.engine.script_for = play
        text = "a page of text that somebody sends again and again; " * 20
        first, predicted, reported, exact = await _sent(client, text)
        assert (predicted, reported, exact) == (0, 0, False)
        for _ in range(3):
            instance, predicted, reported, exact = await _sent(client, text)
            assert (instance, exact) == (first, False)
            assert predicted == (len(text) // 4 - 1) // BLOCK * BLOCK
            assert reported > predicted
        score = (await _facts(client, first))["prediction"]
        assert set(score) == {"text"}
        assert score["text"]["exact_share"] == 1.0  # in chunks: the engine's tokens are shorter than was assumed
        assert (await _facts(client, first))["predicted"]["capacity_tokens"] == 64 * BLOCK


async def test_an_engine_that_knows_no_salts_is_predicted_as_the_one_cache_that_it_is(tmp_path: Path) -> None:
    async with _gateway(tmp_path, [64]) as (client, _):
        await _sent(client, PROMPT, cache_salt="mine")
        assert (await _sent(client, PROMPT, cache_salt="yours"))[1:3] == (10 * BLOCK, 10 * BLOCK)


async def test_an_agents_next_step_finds_what_the_step_before_generated(tmp_path: Path) -> None:
    async with _gateway(tmp_path, [256]) as (client, (cache,)):
        tokens, predictions = list(PROMPT), []
        for step in range(4):
            output = [5000 + 100 * step + n for n in range(41)]

            def play(asked: Asked, output: list[int] = output) -> Script:
                prompt = asked.json["prompt"]
                cached = cache.serve(prompt)
                cache.serve(prompt + output[:-1])
                return Script(body=answer("…", len(prompt), len(output), cached))

            cache.engine.script_for = play
            predictions.append((await _sent(client, tokens))[1:3])
            tokens += [*output, *range(9000 + 100 * step, 9020 + 100 * step)]
        assert all(predicted == reported for predicted, reported in predictions), predictions
        assert predictions[3][0] > len(PROMPT) + 100
