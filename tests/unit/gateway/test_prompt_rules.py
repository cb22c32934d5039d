"""A prompt is made once for all instances of a model: only what all of them can do is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from engine_adapter.base import EngineAdapter, InstanceFacts
from engine_adapter.embedded.adapter import Embedded
from engine_adapter.openai_compatible import OpenAICompatible
from engine_adapter.sglang import Sglang
from gateway.instance import Instance, InstanceSpec
from gateway.models import ModelOptions, SpecialTokens
from gateway.prompt_rules import PromptRules, kind_of, rules_for
from gateway.protocols.openai import read_ask
from gateway.routing import Rates

TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": {}}} for name in "ab"]
MODEL = ModelOptions("m")


def rules(*engines: tuple[EngineAdapter, str | None], options: ModelOptions = MODEL, **more: Any) -> PromptRules:
    instances = []
    for number, (adapter, version) in enumerate(engines):
        instance = Instance(InstanceSpec(f"i{number}", "http://x", adapter, models=("m",)), Rates(1, 1, 1, 1))
        instance.facts = InstanceFacts(models=("m",), version=version)
        instances.append(instance)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **more}
    ask = read_ask(json.dumps(body).encode(), "chat")
    found = rules_for(instances, options, ask)
    assert rules_for(list({kind_of(instance): instance for instance in instances}.values()), options, ask) == found
    return found


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools or ()]


NEW, OLD, OURS, OTHER = (Sglang(), "0.5.23"), (Sglang(), "0.5.22"), (Embedded(), "1"), (OpenAICompatible(), None)


@pytest.mark.parametrize(
    ("engines", "takes_ids", "keeps_text", "are_alike"),
    [
        ([NEW, NEW], True, False, True),
        ([OURS], True, True, True),
        ([OURS, NEW], True, False, False),
        ([NEW, OLD], True, False, False),
        ([NEW, OTHER], False, False, False),
        ([OTHER], False, False, True),
        ([], False, False, True),
    ],
)
def test_all_engines_must_be_able(engines: Any, takes_ids: bool, keeps_text: bool, are_alike: bool) -> None:
    found = rules(*engines)
    assert (found.takes_ids, found.keeps_answers, found.keeps_text) == (takes_ids, takes_ids, keeps_text)
    assert found.are_alike is are_alike
    assert found.special_tokens is SpecialTokens.LITERAL


@pytest.mark.parametrize(
    ("choice", "sglang", "ours"),
    [
        ("none", [], ["a", "b"]),
        ("auto", ["a", "b"], ["a", "b"]),
        ({"type": "function", "function": {"name": "b"}}, ["b"], ["a", "b"]),
    ],
)
def test_tools_are_those_that_the_engine_shows(choice: str | Mapping[str, Any], sglang: Any, ours: Any) -> None:
    assert names(rules(NEW, tool_choice=choice).tools) == sglang
    assert names(rules(OURS, tool_choice=choice).tools) == ours
    assert names(rules(tool_choice=choice).tools) == ["a", "b"]


def test_a_model_may_be_left_alone() -> None:
    options = ModelOptions("m", special_tokens=SpecialTokens.PASS, keeps_answers=False)
    found = rules(NEW, options=options)
    assert (found.special_tokens, found.keeps_answers, found.takes_ids) == (SpecialTokens.PASS, False, True)
