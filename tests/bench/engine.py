"""The embedded engine against ``transformers``' own generate, on the same weights and threads, in the same run.

Every figure is a ratio measured in interleaved repetitions: each repetition measures all contenders one after the
other, the ratio is taken within it, and the median over the repetitions is printed with the least and the greatest.

* ``decode``: our tokens/s of one stream over theirs, after the same prompt
* ``prefill``: our prompt tokens/s (from the time to the first token) over theirs
* ``batch8``: our tokens/s of 8 streams together over our one stream's
* ``hit_ttft``: our time to the first token with the prompt's pages in the device tier over the cold one
* ``llamacpp_decode``: ours over llama.cpp's with 4-bit weights, each multiplied by the bytes of weights it reads for a
  token, which bound both; ``llamacpp_prefill``: unscaled. Where a Python with ``xllamacpp`` is named
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from engine_adapter.embedded.engine import Engine, Finished, GenerationEvent, GenerationRequest, SamplingParams, Token
from engine_adapter.embedded.folders import resolve_model
from engine_adapter.embedded.model import LlamaModel
from engine_adapter.embedded.weights import load_model, weights_id
from kvstore.store import TieredStore
from kvstore.tiers.device import DeviceTier
from tests.bench._llamacpp import LlamaCpp, llama_cpp

PREFILL_TOKENS = 1032  # 64 pages of 16 and 8 more: what is left to compute after a hit
DECODE_PROMPT = 128
DECODE_TOKENS = 33  # the first belongs to the prefill
BATCH = 8
_DEVICE_PAGES = 512


@dataclass(frozen=True, slots=True)
class Timing:
    """When the tokens of one request came, in seconds since it was sent."""

    stamps: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.stamps[0]

    @property
    def tokens_per_s(self) -> float:
        """Rate of the tokens after the first."""
        return (len(self.stamps) - 1) / (self.stamps[-1] - self.stamps[0])


class Ours:
    """The embedded engine with a device tier and nothing below it."""

    def __init__(self, model: LlamaModel, identity: str) -> None:
        self._store = TieredStore(DeviceTier(model.page_layout(identity, 16), pages=_DEVICE_PAGES), [])
        self._engine = Engine(model, self._store)
        self._engine.start()
        self._number = 0

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Timing]:
        """Send the prompts together; return each one's timing."""
        events: queue.SimpleQueue[tuple[int, float, GenerationEvent]] = queue.SimpleQueue()
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._number += 1

            def sink(event: GenerationEvent, index: int = index) -> None:
                events.put((index, time.perf_counter() - start, event))

            self._engine.submit(GenerationRequest(str(self._number), tuple(prompt), sampling), sink)
        stamps: list[list[float]] = [[] for _ in prompts]
        finished = 0
        while finished < len(prompts):
            index, at_s, event = events.get()
            if isinstance(event, Token):
                stamps[index].append(at_s)
            elif isinstance(event, Finished):
                assert event.reason == "length", event
                finished += 1
        return [Timing(tuple(of_one)) for of_one in stamps]

    def close(self) -> None:
        """Stop the thread."""
        self._engine.stop()
        self._store.close()


class _Stamps(transformers.generation.streamers.BaseStreamer):
    """Notes when ``generate`` hands over each token; its first call hands over the prompt."""

    def __init__(self) -> None:
        self.start, self.calls = time.perf_counter(), []  # type: tuple[float, list[float]]

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(time.perf_counter() - self.start)

    def end(self) -> None:
        pass


class Theirs:
    """``transformers``' generate, as it comes."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt: Sequence[int], tokens: int) -> Timing:
        """Generate greedily; return the timing."""
        ids = torch.tensor([list(prompt)])
        stamps = _Stamps()
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, streamer=stamps
        )
        return Timing(tuple(stamps.calls[1:]))


@dataclass(slots=True)
class Samples:
    """The repetitions' values, by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        """Note one repetition's values."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        """Return each name's median."""
        return {name: statistics.median(values) for name, values in self.values.items()}


def repetition(
    ours: Ours, theirs: Theirs, llama: LlamaCpp | str, weight_bytes: int, prompt: Callable[[int], list[int]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Measure everything once; return (ratios, figures with a unit). Every prompt is new but the one that is to hit."""
    long = prompt(PREFILL_TOKENS)
    (cold,) = ours.generate([long], 1)
    (hit,) = ours.generate([long], 1)
    their_prefill = theirs.generate(prompt(PREFILL_TOKENS), 1)
    (stream,) = ours.generate([prompt(DECODE_PROMPT)], DECODE_TOKENS)
    their_stream = theirs.generate(prompt(DECODE_PROMPT), DECODE_TOKENS)
    batch = ours.generate([prompt(DECODE_PROMPT) for _ in range(BATCH)], DECODE_TOKENS)
    everybody_s = max(timing.ttft_s for timing in batch)  # from here on all streams decode
    batch_rate = sum(stamp > everybody_s for timing in batch for stamp in timing.stamps) / (
        min(timing.stamps[-1] for timing in batch) - everybody_s
    )
    ratios = {
        "decode": stream.tokens_per_s / their_stream.tokens_per_s,
        "prefill": their_prefill.ttft_s / cold.ttft_s,
        "batch8": batch_rate / stream.tokens_per_s,
        "hit_ttft": hit.ttft_s / cold.ttft_s,
    }
    figures = {
        "decode_tokens_per_s": stream.tokens_per_s,
        "transformers_decode_tokens_per_s": their_stream.tokens_per_s,
        "batch8_tokens_per_s": batch_rate,
        "prefill_tokens_per_s": PREFILL_TOKENS / cold.ttft_s,
        "transformers_prefill_tokens_per_s": PREFILL_TOKENS / their_prefill.ttft_s,
        "cold_ttft_ms": cold.ttft_s * 1e3,
        "hit_ttft_ms": hit.ttft_s * 1e3,
    }
    if isinstance(llama, LlamaCpp):
        _, llama_decode = llama.rates(prompt(DECODE_PROMPT), DECODE_TOKENS)
        llama_prefill, _ = llama.rates(prompt(PREFILL_TOKENS), 1)
        figures |= {"llamacpp_decode_tokens_per_s": llama_decode, "llamacpp_prefill_tokens_per_s": llama_prefill}
        ratios["llamacpp_decode"] = stream.tokens_per_s * weight_bytes / (llama_decode * llama.weight_bytes)
        ratios["llamacpp_prefill"] = PREFILL_TOKENS / cold.ttft_s / llama_prefill
    return ratios, figures


def main(argv: list[str]) -> int:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="bench engine", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="default", help="a model folder; the packaged model if not given")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    folder = resolve_model(options.model)
    model = load_model(folder, torch.float32)
    ours, theirs = Ours(model, weights_id(folder)), Theirs(folder)
    chance = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [chance.randrange(model.config.vocab_size) for _ in range(tokens)]

    ratios, figures = Samples(), Samples()
    try:
        with llama_cpp(options.threads) as llama:
            ours.generate([prompt(64)], 2)
            theirs.generate(prompt(64), 2)
            for _ in range(options.repetitions):
                of_ratios, of_figures = repetition(ours, theirs, llama, model.weight_bytes, prompt)
                ratios.add(**of_ratios)
                figures.add(**of_figures)
            result = {
                "ratios": ratios.medians(),
                "figures": figures.medians(),
                "repetitions": ratios.values,
                "threads": options.threads,
                "model": folder.name,
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "llamacpp": llama if isinstance(llama, str) else f"xllamacpp {llama.version}",
                },
            }
    finally:
        ours.close()
    report(result, ratios, figures)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def report(result: dict[str, object], ratios: Samples, figures: Samples) -> None:
    """Print versions, figures and ratios for a reader."""
    print(f"model {result['model']}, float32, {result['threads']} threads")
    for name, version in dict(result["versions"]).items():  # type: ignore[call-overload]
        print(f"  {name:12} {version}")
    for name, value in figures.medians().items():
        print(f"{name:36} {value:10.1f}")
    print(f"{'ratio':36} {'median':>10} {'least':>8} {'greatest':>8}")
    for name, value in ratios.medians().items():
        print(f"{name:36} {value:10.3f} {min(ratios.values[name]):8.3f} {max(ratios.values[name]):8.3f}")
