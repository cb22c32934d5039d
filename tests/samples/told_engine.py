"""A caching engine that publishes what it holds, as SGLang does; and one whose cache is what the client marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine_adapter.prompt import PromptEncoder, PromptOptions
from engine_adapter.sglang import Sglang
from kvstore.events import TierCleared
from kvstore.page import Tier
from tests.publishing_engine import PublishingEngine
from tests.samples.caching_engine import CachingEngine
from tests.scripted_engine import Asked, Json, Script, ScriptedEngine

VERSION = "0.5.23"


class ToldEngine(CachingEngine):
    """Its blocks are the index's, and generated tokens are in them. Adapters have caches of their own."""

    def __init__(
        self, encoder: PromptEncoder, model: str = "m", *, caches: bool = True, tells_ids: bool = False
    ) -> None:
        """``caches``: it has a cache; ``tells_ids``: it tells what it generated, where it is asked to."""
        super().__init__(encoder, models=[model])
        self.told = PublishingEngine(self)
        self.info["version"] = VERSION
        self.caches, self.tells_ids = caches, tells_ids
        self.said: list[int] = []
        (self._stop,) = encoder.encode_text("<|im_end|>")

    def evict(self) -> None:
        """Lose every block, and say so."""
        super().evict()
        self.told.publisher.publish([TierCleared((Tier.DEVICE,))])

    async def begin_anew(self) -> None:
        """Be another process in the place of the one that was closed."""
        super().evict()
        self.told.lives_anew()
        self.info["version"] = VERSION
        await self.open()

    def rendered(self, body: Mapping[str, Any], *more: Json) -> list[int]:
        """Return the prompt's ids, as the client's template variables have it; with ``more``, of a whole chat."""
        options = PromptOptions(variables=body.get("chat_template_kwargs"), add_generation_prompt=not more)
        messages = [*body["messages"], *more]
        tools = Sglang().prompt_tools(body.get("tools"), body.get("tool_choice"), VERSION)
        return self._encoder.encode_chat_hashed(messages, tools, options=options).ids.tolist()

    def rendered_by(self, encoder: PromptEncoder) -> None:
        """Have another template from now on."""
        self._encoder = encoder

    def update_weights(self, version: str) -> None:
        """Have other weights from now on, as after SGLang's ``/update_weights_from_disk``: nothing cached is right."""
        self.info["weight_version"] = version
        self.evict()

    def _reply(self, asked: Asked) -> Script:
        script = super()._reply(asked)
        if self.tells_ids and "x-sglext-return-output-ids" in asked.headers:
            assert isinstance(script.body, dict)
            script.body["sglext"] = {"output_ids": [self.said]}
        return script

    def _serve(self, ids: tuple[int, ...], body: Json) -> int:
        return super()._serve(_within(ids, body), body) if self.caches else 0

    def _add(self, ids: tuple[int, ...], message: Mapping[str, Any], body: Json) -> int:
        whole = tuple(self.rendered(body, {"role": "assistant", **message}))
        assert whole[: len(ids)] == ids
        said = list(whole[len(ids) :])
        self.said = said[: said.index(self._stop) + 1]
        if self.caches:
            super()._add(_within(whole, body), message, body)
            if not body.get("lora_path"):
                self.told.holds(whole, salt=body.get("cache_salt"))
        return len(whole) - len(ids)


def _within(ids: tuple[int, ...], body: Json) -> tuple[int, ...]:
    """Prompts of one adapter and salt share nothing with those of another: their first block differs."""
    name = f"{body.get('lora_path') or ''}{body.get('cache_salt') or ''}"
    return (-1 - sum(map(ord, name)), *ids[1:]) if name else ids


class MarkedEngine(ScriptedEngine):
    """Speaks Anthropic's Messages. It keeps a prompt up to each cache marker, and reads the longest that it kept and
    that ends before or at a marker of the request; the rest is written or fresh. A token is four characters."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.kept: set[str] = set()
        self.calls = 0
        self.script_for = self._reply

    def _reply(self, asked: Asked) -> Script:
        self.calls += 1
        places = _marked(asked.json)
        whole = max(len(text) for text, _ in places) // 4
        last = max((at for at, (_, marked) in enumerate(places) if marked), default=-1)
        read = max((len(text) // 4 for text, _ in places[: last + 1] if text in self.kept), default=0)
        written = max((len(text) // 4 for text, marked in places if marked), default=0)
        self.kept |= {text for text, marked in places if marked}
        call = {"type": "tool_use", "id": f"toolu_{self.calls:04d}x{id(self):x}", "name": "look", "input": {"q": "x"}}
        usage = {
            "input_tokens": whole - max(read, written), "cache_read_input_tokens": read,
            "cache_creation_input_tokens": max(written - read, 0), "output_tokens": 30,
        }  # fmt: skip
        return Script(
            body={
                "id": f"msg_{self.calls}", "type": "message", "role": "assistant", "model": asked.json["model"],
                "content": [call], "stop_reason": "tool_use", "stop_sequence": None, "usage": usage,
            }
        )  # fmt: skip


def _marked(body: Json) -> list[tuple[str, bool]]:
    """Return the prompt up to each of its parts, and whether that ends at a marker."""
    parts = [*body.get("tools", ()), *body.get("system", ())]
    for message in body["messages"]:
        content = message["content"]
        parts += [{"role": message["role"], **part} for part in content] if isinstance(content, list) else [message]
    found, text = [], ""
    for part in parts:
        text += json.dumps({name: value for name, value in part.items() if name != "cache_control"})
        found.append((text, "cache_control" in part))
    return found
