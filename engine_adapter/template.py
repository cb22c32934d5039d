"""Chat templates: compiling and rendering the Jinja dialect that Hugging Face models publish.

The environment is the one of ``transformers`` (immutable sandbox, ``trim_blocks``, ``lstrip_blocks``, loop controls,
``{% generation %}`` blocks, ``tojson`` that escapes no HTML, ``raise_exception``, ``strftime_now``), so that a
published template renders here to the same text. Templates come from strangers: the sandbox is not optional.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_adapter.prompt_errors import PromptError, TemplateError
from engine_adapter.resumption import LoopState, Rendering, ResumableTemplate, plain

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
_ATTRIBUTES_OF_OBJECTS = frozenset(dir(dict))
_as_json = json.JSONEncoder(ensure_ascii=False).encode
_log = logging.getLogger(__name__)
MODEL_TEMPLATE = "model"
"""The name under which a model's own template is selected."""


def named_templates() -> list[str]:
    """Return the names of keepwarm's own templates, sorted; ``templates/README.md`` documents them."""
    return sorted(path.stem for path in TEMPLATE_FOLDER.glob("*.jinja"))


class ChatTemplate:
    """One compiled template and the variables that its model defines (``bos_token`` and the like)."""

    def __init__(self, source: str, *, name: str, variables: Mapping[str, str] | None = None) -> None:
        """Compile ``source``. Raises ``TemplateError`` where it is not valid Jinja."""
        self.name = name
        self.source = source
        self._variables = dict(variables or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tree = environment.parse(source)
            self._resumable: ResumableTemplate | None = None
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template {name!r} does not compile: {error}") from error
        try:
            self._resumable = ResumableTemplate(source, environment)
        except ValueError as error:
            _log.debug("chat template %s is rendered whole each time: %s", name, error)

    def literal_text(self) -> str:
        """Return all text that the template itself may write, joined by NUL so that no match spans two pieces."""
        texts = {node.data for node in self._tree.find_all(nodes.TemplateData)}
        texts |= {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return "\0".join(sorted(texts))

    def reads_parts(self) -> bool:
        """Tell whether the template walks over the parts of a message's content; others want them joined."""
        contents = {"content"}
        for assignment in self._tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _is_named(assignment.node, {"content"}):
                contents.add(assignment.target.name)
        return any(_is_named(loop.iter, contents) for loop in self._tree.find_all(nodes.For))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        *,
        add_generation_prompt: bool,
        **extra: object,
    ) -> str:
        """Return the text of the chat. Raises ``PromptError`` where the template refuses it or cannot render it."""
        with _as_prompt_errors(self.name):
            return self._template.render(
                messages=messages, **self._context(tools, add_generation_prompt=add_generation_prompt, **extra)
            )

    @property
    def is_resumable(self) -> bool:
        """Whether longer conversations can be rendered from where shorter ones ended."""
        return self._resumable is not None

    def resume(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        state: LoopState | None,
        *,
        add_generation_prompt: bool,
        **extra: object,
    ) -> Rendering:
        """Return what ``render`` does, from ``state`` on where it holds; ``state`` must come from a conversation with
        which ``messages`` begin and from the same other arguments. Raises ``PromptError``."""
        if self._resumable is None:
            text = self.render(messages, tools, add_generation_prompt=add_generation_prompt, **extra)
            return Rendering("", "", text, None, False)
        with _as_prompt_errors(self.name):
            variables = self._context(tools, add_generation_prompt=add_generation_prompt, **extra)
            return self._resumable.render(messages, variables, state)

    def _context(self, tools: Sequence[Mapping[str, object]] | None, **extra: object) -> dict[str, object]:
        return {"tools": tools, "documents": None, **self._variables, **extra}


@contextmanager
def _as_prompt_errors(name: str) -> Iterator[None]:
    try:
        yield
    # A template is someone else's program: these are the ways in which it fails on data that it did not expect.
    except (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        raise PromptError(f"the chat template {name!r} cannot render these messages: {error}") from error


def _is_named(node: nodes.Node, names: set[str]) -> bool:
    """Tell whether an expression is a variable, an attribute or an item of one of these names, or a filter of such."""
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_named(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr in names
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value in names
    return isinstance(node, nodes.Name) and node.name in names


def load_named(name: str, variables: Mapping[str, str]) -> ChatTemplate:
    """Return keepwarm's template of this name. Raises ``TemplateError`` for an unknown name."""
    path = TEMPLATE_FOLDER / f"{name}.jinja"
    if name not in named_templates():
        raise TemplateError(f"no chat template is named {name!r}; there are {', '.join(named_templates())}")
    return ChatTemplate(path.read_text(encoding="utf-8"), name=name, variables=variables)


def read_model_templates(model_dir: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return a model's own templates by name: ``default`` and, where it publishes one, ``tool_use``. May be empty.

    ``config`` is the content of ``tokenizer_config.json``. A ``chat_template.jinja`` beside it wins.
    """
    found: dict[str, str] = {}
    published = config.get("chat_template")
    if isinstance(published, str):
        found["default"] = published
    elif isinstance(published, list):
        for entry in cast("list[Mapping[str, str]]", published):
            found[entry["name"]] = entry["template"]
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    single = model_dir / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text(encoding="utf-8")
    return found


class _GenerationBlocks(Extension):
    """``{% generation %} … {% endgeneration %}`` marks what the model wrote; for us it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's own, with a short way to a JSON object's members: it looks for an attribute first, and catches that there
    is none."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what ``obj.attribute`` means in a template."""
        if type(obj) is dict and attribute not in _ATTRIBUTES_OF_OBJECTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["fromjson"] = _fromjson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = cast("Callable[[str], str]", lambda pattern: datetime.now().strftime(pattern))
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not (ensure_ascii or indent is not None or separators or sort_keys):
        return _as_json(plain(value))  # an encoder is made once and not for every value
    return json.dumps(
        plain(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _fromjson(text: str) -> object:
    """Return what ``text`` says as JSON, itself where it is none. For our templates; transformers has none such."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
