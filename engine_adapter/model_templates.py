"""Which chat template a model gets, and what its configuration files say that templates need."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from engine_adapter.messages import for_model_template
from engine_adapter.prompt_errors import PromptError, TemplateError
from engine_adapter.template import MODEL_TEMPLATE, ChatTemplate, load_named, named_templates, read_model_templates

DEFAULT_TEMPLATE = "chatml-tools"

NAMED_FOR = {
    "chatml-tools": ("<|im_start|>", "<|im_end|>"),
    "llama3-tools": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "deepseek-v3-tools": ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>"),
    "gemma3-tools": ("<start_of_turn>", "<end_of_turn>"),
    "mistral-v3": ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
}
"""Keepwarm's templates, and the control tokens by which a tokenizer shows that its model was trained on that form."""

_END_OF_ANSWER = {
    "chatml-tools": "<|im_end|>",
    "llama3-tools": "<|eot_id|>",
    "deepseek-v3-tools": "<｜end▁of▁sentence｜>",
    "gemma3-tools": "<end_of_turn>",
    "mistral-v3": "</s>",
}
_SHAPED = frozenset({"mistral-v3"})  # it writes arguments by value, the others as they came
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """The template of a model, and how messages must be shaped for it."""

    template: ChatTemplate
    tool_template: ChatTemplate
    """The one for requests with tools; mostly the same."""
    is_own: bool
    """The model's own, or a file of the user's: not one of keepwarm's."""
    is_shaped: bool = True
    """Messages are brought into the form that published templates expect; else they come as clients write them."""
    null_as_empty: bool = False
    parse_arguments: bool = True
    """Tool-call arguments become objects; some templates only take them as a string."""


def choose_template(model_dir: Path, tokenizer: Tokenizer, wanted: str | None) -> TemplateChoice:
    """Return the template named ``wanted``; see ``PromptEncoder.load``. Raises ``TemplateError``."""
    config = read_json(model_dir / "tokenizer_config.json")
    variables = special_variables(config)
    if wanted is not None and wanted in named_templates():
        return _named(wanted, variables)
    if wanted is not None and wanted != MODEL_TEMPLATE:
        path = Path(wanted)
        if not path.is_file():
            raise TemplateError(f"{wanted!r} is neither a template's name ({', '.join(named_templates())}) nor a file")
        own = {"default": path.read_text(encoding="utf-8")}
    else:
        own = read_model_templates(model_dir, config)
    compiled = {name: ChatTemplate(source, name=MODEL_TEMPLATE, variables=variables) for name, source in own.items()}
    default, with_tools = compiled.get("default"), compiled.get("tool_use")
    if default is None and with_tools is None and wanted == MODEL_TEMPLATE:
        raise TemplateError("the model publishes no chat template of its own")
    first = default or with_tools
    if first is not None:
        for null_as_empty in (False, True):
            for parse in (True, False):
                choice = TemplateChoice(first, with_tools or first, True, True, null_as_empty, parse)
                if can_render_tools(choice):
                    return choice
    named = next((name for name, tokens in NAMED_FOR.items() if _knows(tokenizer, tokens)), None)
    if wanted is None and named is not None:
        _log.info("the model's own chat template cannot render tools: using %s", named)
        return _named(named, variables)
    if first is None:
        raise TemplateError(f"the model publishes no chat template; name one of {', '.join(named_templates())}")
    return TemplateChoice(first, with_tools or first, True, null_as_empty=True)


def can_render_tools(choice: TemplateChoice) -> bool:
    """Tell whether a template shows tools, a call without content, and its result. Renders one small probe."""
    call = {
        "id": "call00001",  # Mistral's templates insist on nine letters or digits
        "type": "function",
        "function": {"name": "probe_tool", "arguments": '{"argument": "probe_value"}'},
    }
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "probe_question"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "probe_tool", "content": "probe_result"},
    ]
    schema = {"type": "object", "properties": {"argument": {"type": "string"}}}
    function = {"name": "probe_tool", "description": "probe_description", "parameters": schema}
    shaped = for_model_template(messages, null_as_empty=choice.null_as_empty, parse_arguments=choice.parse_arguments)
    try:
        text = choice.tool_template.render(
            shaped, [{"type": "function", "function": function}], add_generation_prompt=True
        )
    except PromptError:
        return False
    return all(word in text for word in ("probe_description", "probe_value", "probe_result"))


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a file, an empty one where there is no file."""
    return cast("dict[str, object]", json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def special_variables(config: Mapping[str, object]) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token`` and the like as text, as templates refer to them."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def stop_tokens(tokenizer: Tokenizer, model_dir: Path, template_name: str) -> frozenset[int]:
    """Return every token that ends an answer: of the generation config, the model, the tokenizer and the template."""
    stops: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(model_dir / name).get("eos_token_id")
        stops.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    variables = special_variables(read_json(model_dir / "tokenizer_config.json"))
    for text in (variables.get("eos_token"), _END_OF_ANSWER.get(template_name)):
        if text is not None and (token_id := tokenizer.token_to_id(text)) is not None:
            stops.add(token_id)
    return frozenset(stops)


def _named(name: str, variables: Mapping[str, str]) -> TemplateChoice:
    template = load_named(name, variables)
    return TemplateChoice(template, template, is_own=False, is_shaped=name in _SHAPED)


def _knows(tokenizer: Tokenizer, tokens: tuple[str, ...]) -> bool:
    return all(tokenizer.token_to_id(token) is not None for token in tokens)
