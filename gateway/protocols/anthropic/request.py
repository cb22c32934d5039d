"""A Messages request as a dialog.

Read and understood: text, images, documents, tools and their results, thinking, structured output, effort, stop
sequences. Read and left out, since nothing behind the gateway depends on them: cache markers (engines cache every
prefix), context management, service tiers. Refused by name: tools that run at the vendor, and what lies there.

Source: Anthropic's API reference (``anthropic-version: 2023-06-01``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.errors import NoThreads
from gateway.protocols.base import model_of, stream_of
from gateway.protocols.dialog import (
    Answered,
    Call,
    Choice,
    Dialog,
    File,
    Format,
    Image,
    Json,
    Part,
    Reading,
    Result,
    Said,
    Text,
    Tool,
    Turn,
    arguments_text,
    joined,
)

INVALID_JSON = "INVALID_JSON"
"""What a call's input is called whose text is no JSON object; the API's own name for it."""

_READ = frozenset(
    {
        "model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream", "temperature",
        "top_p", "top_k", "thinking", "output_config", "output_format", "metadata",
    }
)  # fmt: skip
_LEFT_OUT = frozenset(
    {
        "cache_control", "context_management", "service_tier", "inference_geo", "speed", "diagnostics",
        "user_profile_id", "workspace_id", "betas", "anthropic_beta", "anthropic_version", "compaction",
        "billing_policy", "fallback_credit_token",
    }
)  # fmt: skip
_REFUSED = ("container", "mcp_servers", "fallbacks")
_KNOWN = _READ | _LEFT_OUT | {*_REFUSED, "thread"}
_SAMPLING = ("temperature", "top_p")
_THINKING = frozenset({"thinking", "redacted_thinking"})


def read_dialog(values: Json, *, needs_limit: bool = True) -> Dialog:
    """Return the request's dialog. Raises ``BadRequest``, which names the member."""
    request = Reading(values)
    for name in _REFUSED:
        if values.get(name):
            raise request.refused(name)
    if values.get("thread"):
        raise NoThreads
    limit = request.count("max_tokens")
    if needs_limit and limit is None:
        raise request.wrong("max_tokens", "Field required")
    system = _system(request)
    config = request.object("output_config") or Reading({})
    metadata = request.object("metadata") or Reading({})
    choice = request.object("tool_choice")
    sampling = {name: value for name in _SAMPLING if (value := request.number(name)) is not None}
    if (top_k := request.count("top_k", least=0)) is not None:
        sampling["top_k"] = top_k
    return Dialog(
        model=model_of(values),
        turns=joined([*system, *_turns(request)]),
        stream=stream_of(values),
        tools=tuple(map(_tool, request.objects("tools"))),
        choice=None if choice is None else _choice(choice),
        is_parallel=_is_parallel(choice),
        max_tokens=limit,
        stops=request.texts("stop_sequences"),
        format=_format(config.object("format") or request.object("output_format")),
        effort=config.maybe_text("effort"),
        user=metadata.maybe_text("user_id"),
        sampling=sampling,
        extras={name: value for name, value in values.items() if name not in _KNOWN},
    )


def shows_thinking(values: Json) -> bool:
    """Tell whether the client may be shown what the model thought: not where it turned thinking off."""
    thinking = values.get("thinking")
    return not (isinstance(thinking, dict) and "disabled" in (thinking.get("type"), thinking.get("display")))


def continued(values: Json) -> str | None:
    """Return the id of the answer that the request continues, where an engine holds the conversation up to it."""
    thread = values.get("thread")
    previous = thread.get("previous_message_id") if isinstance(thread, dict) else None
    return previous if isinstance(previous, str) else None


def _system(request: Reading) -> list[Turn]:
    system = request.values.get("system")
    if system is None or system in ("", []):
        return []
    if isinstance(system, str):
        return [Said("system", (Text(system),))]
    blocks = request.objects("system")
    return [Said("system", tuple(Text(_expect(block, "text").text("text")) for block in blocks))]


def _expect(block: Reading, kind: str) -> Reading:
    if block.values.get("type") != kind:
        raise block.refused("type", f"must be {kind!r}")
    return block


def _turns(request: Reading) -> Iterator[Turn]:
    messages = request.objects("messages")
    if not messages:
        raise request.wrong("messages", "at least one message is required")
    for message in messages:
        role = message.text("role")
        blocks = _blocks(message)
        if role == "assistant":
            yield _answered(blocks)
        elif role == "system":
            yield Said("system", tuple(map(_part, blocks)))
        elif role == "user":
            yield from _user(blocks)
        else:
            raise message.wrong("role", "must be 'user' or 'assistant'")


def _blocks(message: Reading) -> Sequence[Reading]:
    content = message.values.get("content")
    if content is None:
        raise message.wrong("content", "Field required")
    if isinstance(content, str):
        return (Reading({"type": "text", "text": content}, message.path("content")),)
    return message.objects("content")


def _user(blocks: Sequence[Reading]) -> Iterator[Turn]:
    """Yield results first, whatever their place: a chat wants them right behind the calls."""
    rest = []
    for block in blocks:
        if block.values.get("type") == "tool_result":
            yield _result(block)
        else:
            rest.append(_part(block))
    if rest or not blocks:
        yield Said("user", tuple(rest))


def _result(block: Reading) -> Result:
    content = block.values.get("content")
    parts = (Text(content),) if isinstance(content, str) else tuple(map(_part, block.objects("content")))
    return Result(block.text("tool_use_id"), parts)


def _part(block: Reading) -> Part:
    kind = block.text("type")
    if kind == "text":
        return Text(block.text("text"))
    if kind == "image":
        return _image(_source(block))
    if kind == "document":
        return _document(block, _source(block))
    if kind == "search_result":
        texts = [_expect(part, "text").text("text") for part in block.objects("content")]
        return Text("\n".join([block.text("title"), block.text("source"), *texts]))
    if kind == "tool_reference":  # by which a client's own search for tools tells what it found: they are all given
        return Text(block.text("tool_name"))
    raise block.refused("type", f"engines behind this gateway cannot read a block of type {kind!r}")


def _source(block: Reading) -> Reading:
    source = block.object("source")
    if source is None:
        raise block.wrong("source", "Field required")
    return source


def _image(source: Reading) -> Image:
    kind = source.text("type")
    if kind == "base64":
        return Image(f"data:{source.text('media_type')};base64,{source.text('data')}")
    if kind == "url":
        return Image(source.text("url"))
    raise source.refused("type", f"an image of type {kind!r} lies where no engine can read it")


def _document(block: Reading, source: Reading) -> Part:
    kind, title = source.text("type"), block.maybe_text("title")
    if kind == "base64":
        return File(f"data:{source.text('media_type')};base64,{source.text('data')}", title)
    if kind == "text":
        texts = [source.text("data")]
    elif kind == "content" and isinstance(content := source.values.get("content"), str):
        texts = [content]
    elif kind == "content":
        texts = [_expect(part, "text").text("text") for part in source.objects("content")]
    else:
        raise source.refused("type", f"a document of type {kind!r} lies where no engine can read it")
    about = [told for told in (title, block.maybe_text("context")) if told]
    return Text("\n".join([*about, *texts]))


def _answered(blocks: Sequence[Reading]) -> Answered:
    text, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            text.append(block.text("text"))
        elif kind == "thinking":
            reasoning.append(block.text("thinking"))
        elif kind == "tool_use":
            calls.append(Call(block.text("id"), block.text("name"), _arguments(block)))
        elif kind not in _THINKING:
            raise block.refused("type", f"engines behind this gateway cannot read a block of type {kind!r}")
    return Answered("".join(text), "".join(reasoning), tuple(calls))


def _arguments(block: Reading) -> str:
    given = block.object("input")
    if given is None:
        raise block.wrong("input", "Field required")
    broken = given.values.get(INVALID_JSON)
    return broken if isinstance(broken, str) and len(given.values) == 1 else arguments_text(given.values)


def _tool(tool: Reading) -> Tool:
    kind = tool.maybe_text("type")
    if kind not in (None, "custom"):
        raise tool.refused("type", f"a tool of type {kind!r} is known to its vendor's models only")
    schema = tool.object("input_schema")
    return Tool(
        tool.text("name"),
        None if schema is None else schema.values,
        tool.maybe_text("description"),
        tool.flag("strict"),
    )


def _choice(choice: Reading) -> Choice:
    kind = choice.text("type")
    if kind == "tool":
        return Choice("named", choice.text("name"))
    if kind == "any":
        return Choice("required")
    if kind == "auto":
        return Choice("auto")
    if kind == "none":
        return Choice("none")
    raise choice.wrong("type", "must be auto, any, tool or none")


def _is_parallel(choice: Reading | None) -> bool | None:
    disabled = None if choice is None else choice.flag("disable_parallel_tool_use")
    return None if disabled is None else not disabled


def _format(wanted: Reading | None) -> Format | None:
    if wanted is None:
        return None
    kind, schema = wanted.text("type"), wanted.object("schema")
    if kind != "json_schema" or schema is None:
        raise wanted.refused("type", "must be 'json_schema' with a schema")
    return Format(schema.values, strict=True)
