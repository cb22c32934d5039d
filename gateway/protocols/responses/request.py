"""A Responses request as a dialog.

Read and understood: input items of every kind that chat completions have a word for, instructions, functions and custom
tools (in namespaces, too), structured output, reasoning effort, logprobs. Read and left out, since nothing behind the
gateway depends on them: what concerns the vendor's own storage, caches and tiers. Refused by name: tools that run at
the vendor, background work, conversations and prompts that are kept there.

Source: OpenAI's API reference, Responses.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.protocols.base import model_of, stream_of
from gateway.protocols.dialog import Choice, Dialog, Format, Json, Reading, Said, Text, Turn, joined
from gateway.protocols.responses.custom_tools import CUSTOM
from gateway.protocols.responses.items import turns_of
from gateway.protocols.responses.tools import FUNCTION, NAMESPACE, functions_of, whole_name

_READ = frozenset(
    {
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens",
        "temperature", "top_p", "top_logprobs", "text", "reasoning", "stream", "previous_response_id", "user",
    }
)  # fmt: skip
_LEFT_OUT = frozenset(
    {
        "store", "metadata", "include", "service_tier", "safety_identifier", "prompt_cache_key", "truncation",
        "prompt_cache_retention", "prompt_cache_options", "max_tool_calls", "stream_options", "context_management",
        "client_metadata", "background_options", "access_programs", "moderation", "image",
    }
)  # fmt: skip
_REFUSED = ("background", "conversation", "prompt")
_KNOWN = _READ | _LEFT_OUT | {*_REFUSED}
_SAMPLING = ("temperature", "top_p")
_LOGPROBS = "message.output_text.logprobs"


def read_dialog(values: Json, items: Sequence[Json]) -> Dialog:
    """Return the dialog of a request whose input, with all that came before it, is ``items``. Raises ``BadRequest``."""
    request = Reading(values)
    for name in _REFUSED:
        if values.get(name):
            raise request.refused(name)
    if request.maybe_text("truncation") not in (None, "disabled"):
        raise request.refused("truncation", "a conversation that is too long is never cut here")
    text, reasoning = request.object("text") or Reading({}), request.object("reasoning") or Reading({})
    sampling: dict[str, object] = {n: value for n in _SAMPLING if (value := request.number(n)) is not None}
    if _LOGPROBS in request.texts("include") or values.get("top_logprobs"):
        sampling |= {"logprobs": True, "top_logprobs": request.count("top_logprobs", least=0) or 0}
    if (verbosity := text.maybe_text("verbosity")) is not None:
        sampling["verbosity"] = verbosity
    return Dialog(
        model=model_of(values),
        turns=joined([*_instructions(request), *turns_of(items)]),
        stream=stream_of(values),
        tools=functions_of(values, items),
        choice=_choice(request),
        is_parallel=request.flag("parallel_tool_calls"),
        max_tokens=request.count("max_output_tokens"),
        format=_format(text.object("format")),
        effort=reasoning.maybe_text("effort"),
        user=request.maybe_text("user"),
        sampling=sampling,
        extras={name: value for name, value in values.items() if name not in _KNOWN},
    )


def _instructions(request: Reading) -> list[Turn]:
    told = request.maybe_text("instructions")
    return [Said("system", (Text(told),))] if told else []


def _choice(request: Reading) -> Choice | None:
    given = request.values.get("tool_choice")
    if given is None:
        return None
    if isinstance(given, str):
        modes = {"auto": Choice("auto"), "none": Choice("none"), "required": Choice("required")}
        if given not in modes:
            raise request.wrong("tool_choice", "must be auto, none, required or a function")
        return modes[given]
    choice = request.object("tool_choice") or Reading({})
    if choice.text("type") not in (FUNCTION, CUSTOM):
        raise choice.refused("type", "only a function or a custom tool can be chosen")
    return Choice("named", whole_name(choice.maybe_text(NAMESPACE), choice.text("name")))


def _format(wanted: Reading | None) -> Format | None:
    if wanted is None:
        return None
    kind = wanted.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Format()
    schema = wanted.object("schema")
    if kind != "json_schema" or schema is None:
        raise wanted.wrong("type", "must be text, json_object or json_schema with a schema")
    return Format(schema.values, wanted.text("name"), wanted.flag("strict"), wanted.maybe_text("description"))
