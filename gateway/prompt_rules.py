"""What becomes of a prompt on its way to the engines that may answer it: policies of its model, abilities of theirs.

A prompt is made once, before an instance is chosen, so only what all of them can do is done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum

import msgspec

from engine_adapter.base import Capabilities, EngineAdapter
from gateway.instance import Instance
from gateway.models import ModelOptions, SpecialTokens
from gateway.protocols.base import Ask

Tools = Sequence[Mapping[str, object]] | None


class Handling(StrEnum):
    """What became of text in a conversation that spells a special token."""

    LITERAL = "literal"  # it is ordinary text to the model: the engine sees to that, or was given token ids
    ESCAPED = "escaped"  # it holds an invisible character now
    PASSED = "passed"  # it went to the engine as it came


class PromptRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of one request."""

    reads_chat: bool = True
    """The engines get the request as a chat."""
    takes_ids: bool = False
    """The engines read token ids instead of messages, where they are given some."""
    keeps_text: bool = False
    """The engines themselves keep special tokens in messages as ordinary text."""
    special_tokens: SpecialTokens = SpecialTokens.PASS
    keeps_answers: bool = False
    """The engines tell the ids that they generate, and quoted answers get these."""
    tools: Tools = None
    """As the engines' chat template is given them."""
    are_alike: bool = True
    """All engines make the same prompt of the request."""


def kind_of(instance: Instance) -> Hashable:
    """Return what all is the same of two instances of which the same rules hold for every request."""
    return _kind(instance), instance.capabilities, instance.spec.speaks


def rules_for(instances: Sequence[Instance], options: ModelOptions, ask: Ask) -> PromptRules:
    """Return what holds for a request of this model."""
    kinds = {_kind(instance): instance for instance in instances}  # of many instances, mostly one
    choice = ask.form.values.get("tool_choice")
    shown = [kind.spec.adapter.prompt_tools(ask.tools, choice, _version(kind)) for kind in kinds.values()]
    reads_chat = bool(instances) and all(_reads_chat(instance, ask) for instance in instances)

    def every(holds: Callable[[Capabilities], bool]) -> bool:
        return reads_chat and all(holds(instance.capabilities) for instance in instances)

    takes_ids = every(lambda able: able.input_ids)
    return PromptRules(
        reads_chat=reads_chat,
        takes_ids=takes_ids,
        keeps_text=every(lambda able: able.literal_text),
        special_tokens=options.special_tokens,
        keeps_answers=options.keeps_answers and takes_ids and every(lambda able: able.output_ids),
        tools=shown[0] if shown else ask.tools,
        are_alike=all(other == shown[0] for other in shown[1:]),
    )


def _reads_chat(instance: Instance, ask: Ask) -> bool:
    """Tell whether the request reaches the engine as a chat: written as one, or translated."""
    return ask.messages is not None and (ask.endpoint == "chat" or not instance.speaks(ask.endpoint))


def _kind(instance: Instance) -> tuple[type[EngineAdapter], str | None]:
    return type(instance.spec.adapter), _version(instance)


def _version(instance: Instance) -> str | None:
    return instance.facts.version if instance.facts is not None else None
