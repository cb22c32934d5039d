"""Prompts: OpenAI messages to the token ids that a model sees, for the gateway and for the embedded engine alike.

check → shape → guard markers → render → split at control tokens → encode each segment (memoized). See ``messages``,
``markers``, ``template`` and ``segments``; this module only puts them together and decides which template a model gets.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from engine_adapter.markers import Markers, unused_marks
from engine_adapter.messages import check_messages, check_tools, for_model_template
from engine_adapter.prompt_errors import PromptError, TemplateError
from engine_adapter.segments import MemoStats, SegmentEncoder, control_tokens
from engine_adapter.template import MODEL_TEMPLATE, ChatTemplate, load_named, named_templates, read_model_templates

__all__ = ["DEFAULT_TEMPLATE", "PromptEncoder", "PromptError", "TemplateError", "can_render_tools"]

DEFAULT_TEMPLATE = "chatml-tools"
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_log = logging.getLogger(__name__)


class PromptEncoder:
    """One model's template and tokenizer. Thread-safe; each segment of text is encoded once while the memo holds it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        tool_template: ChatTemplate | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        vocab_size: int | None = None,
        null_as_empty: bool = False,
        memo_bytes: int = 64 << 20,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_name = template.name
        self.stop_token_ids = stop_token_ids
        self.vocab_size: int = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
        self._template, self._tool_template = template, tool_template or template
        self._is_own = template.name not in named_templates()
        self._null_as_empty = null_as_empty
        written = template.literal_text() + "\0" + self._tool_template.literal_text()
        self._markers = Markers(control_tokens(tokenizer, written))
        self._segments = SegmentEncoder(tokenizer, self._markers, memo_bytes=memo_bytes)
        self._text_prefix, self._text_suffix = _text_frame(tokenizer)

    @classmethod
    def load(cls, model_dir: Path, *, template: str | None = None, memo_bytes: int = 64 << 20) -> PromptEncoder:
        """Read a Hugging Face folder (``tokenizer.json`` and its configuration files).

        ``template`` is a name of ``templates/README.md``, ``"model"`` for the model's own, or the path of a Jinja file.
        ``None`` takes the model's own where it can render tools and null content, else ``chatml-tools`` where the
        tokenizer knows ChatML, else the model's own with what it can. Raises ``TemplateError`` where there is none.
        """
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _read_json(model_dir / "tokenizer_config.json")
        variables = _special_variables(config)
        chosen, tool_template, null_as_empty = _choose(model_dir, config, variables, tokenizer, template)
        model_config = _read_json(model_dir / "config.json")
        vocab_size = model_config.get("vocab_size")
        return cls(
            tokenizer,
            chosen,
            tool_template=tool_template,
            stop_token_ids=_stop_tokens(tokenizer, model_dir, model_config, variables, chosen.name),
            vocab_size=vocab_size if isinstance(vocab_size, int) else None,
            null_as_empty=null_as_empty,
            memo_bytes=memo_bytes,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of the chat; text that spells a control token stays text.

        Raises ``PromptError`` for a bad role, malformed content, or what the template refuses. Costs one pass over the
        text plus the encoding of segments never seen.
        """
        checked, checked_tools = check_messages(messages), check_tools(tools)
        if self._is_own:
            checked = for_model_template(checked, null_as_empty=self._null_as_empty)
        guard, cut = unused_marks([checked, checked_tools], 2)
        guarded_tools = cast("list[dict[str, object]] | None", self._markers.guard_value(checked_tools, guard))
        template = self._tool_template if guarded_tools else self._template
        text = template.render(
            self._markers.guard(checked, guard),
            guarded_tools,
            add_generation_prompt=add_generation_prompt,
            **({} if self._is_own else {"cut": cut}),
        )
        return self._segments.encode(text, guard=guard, cut=cut)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a raw prompt as the model's tokenizer makes them: control tokens in it count as such."""
        return self._text_prefix + self._segments.encode(text) + self._text_suffix

    def memo_stats(self) -> MemoStats:
        """Return the counters of the memo of segments."""
        return self._segments.stats()


def can_render_tools(template: ChatTemplate, *, null_as_empty: bool) -> bool:
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
    tool = {"type": "function", "function": function}
    try:
        text = template.render(
            for_model_template(messages, null_as_empty=null_as_empty), [tool], add_generation_prompt=True
        )
    except PromptError:
        return False
    return all(word in text for word in ("probe_description", "probe_value", "probe_result"))


def _choose(
    model_dir: Path,
    config: Mapping[str, object],
    variables: Mapping[str, str],
    tokenizer: Tokenizer,
    wanted: str | None,
) -> tuple[ChatTemplate, ChatTemplate | None, bool]:
    """Return the template, the one for requests with tools, and whether null content must be an empty string."""
    if wanted is not None and wanted in named_templates():
        return load_named(wanted, variables), None, False
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
    for null_as_empty in (False, True):
        if first is not None and can_render_tools(with_tools or first, null_as_empty=null_as_empty):
            return first, with_tools, null_as_empty
    knows_chatml = all(tokenizer.token_to_id(token) is not None for token in _CHATML_TOKENS)
    if wanted is None and knows_chatml:
        _log.info("the model's own chat template cannot render tools: using %s", DEFAULT_TEMPLATE)
        return load_named(DEFAULT_TEMPLATE, variables), None, False
    if first is None:
        raise TemplateError(f"the model publishes no chat template; name one of {', '.join(named_templates())}")
    return first, with_tools, True


def _text_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a raw text (a beginning-of-text token, mostly)."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    framed: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    return framed[:start], framed[start + len(bare) :]


def _read_json(path: Path) -> dict[str, object]:
    return cast("dict[str, object]", json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _special_variables(config: Mapping[str, object]) -> dict[str, str]:
    """Return ``bos_token``, ``eos_token`` and the like as text, as templates refer to them."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _stop_tokens(
    tokenizer: Tokenizer,
    model_dir: Path,
    model_config: Mapping[str, object],
    variables: Mapping[str, str],
    template_name: str,
) -> frozenset[int]:
    """Return every token that ends an answer: of the generation config, the model, the tokenizer and the template."""
    stops: set[int] = set()
    for declared in (_read_json(model_dir / "generation_config.json"), model_config):
        value = declared.get("eos_token_id")
        stops.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    texts = [variables.get("eos_token"), "<|im_end|>" if template_name == DEFAULT_TEMPLATE else None]
    for text in texts:
        if text is not None and (token_id := tokenizer.token_to_id(text)) is not None:
            stops.add(token_id)
    return frozenset(stops)
