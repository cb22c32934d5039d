"""The edit that would bring a hit back, in words, for each kind of break. Pure."""

from __future__ import annotations

from tracing.detail import BreakKind, PromptChange

_AT = {
    BreakKind.MODEL_CHANGED: "Keep the model of {path} through the run: a cache serves one model.",
    BreakKind.PARAMS_CHANGED: "Keep {path} as it is through the run: the chat template may print it.",
    BreakKind.NAMESPACE_CHANGED: "Keep {path} as it is through the run: it names the cache.",
    BreakKind.TIMESTAMP: "Take the time at {where} out, or move it behind the last message: all that stands behind "
    "it is computed anew each time it moves.",
    BreakKind.UUID: "Take the identifier at {where} out, or move it behind the last message.",
    BreakKind.COUNTER: "Take the counter at {where} out, or move it behind the last message.",
    BreakKind.TOOLS_REORDERED: "List the tools in a fixed order, by name for instance: {path} is the first that moved.",
    BreakKind.TOOLS_CHANGED: "Send the same tools at every step (tool_choice limits what may be called), and put new "
    "ones at the end: {path} differs.",
    BreakKind.SPELLING: "Write {path} in one spelling: the same member order and white space at each step.",
    BreakKind.CACHE_CONTROL: "Leave cache markers where they were and add new ones behind them: {path} moved.",
    BreakKind.SYSTEM_EDITED: "Leave the system prompt as it was and say what changed in a later message: {where}.",
    BreakKind.HISTORY_REWRITTEN: "Append to the history instead of rewriting it: {where} differs. Where it must get "
    "shorter, do it seldom and by much.",
    BreakKind.ECHO_REASONING: "Give answers back with their reasoning: {path} was left out.",
    BreakKind.ECHO_TOOL_JSON: "Give tool calls back as the text that came, without parsing and printing it: {where}.",
    BreakKind.ECHO_TEXT: "Give answers back word for word: {where} differs.",
    BreakKind.TEMPLATE_CHANGED: "Keep one chat template and adapter through the run: {path}.",
}
_OURS = {
    BreakKind.TEMPLATE_CHANGED: "Template, adapter or weights are others than a step ago: let runs end before that.",
    BreakKind.ECHO_TEMPLATE: "The chat template writes quoted answers otherwise than they were generated: use one that "
    "keeps them, or an engine that takes token ids.",
    BreakKind.EXPIRED: "Nothing to edit: the prefix outlived its cache. Longer lifetimes, or a small request in time.",
    BreakKind.EVICTED: "Nothing to edit: the caches were too small for what was used since. More host memory or disk.",
    BreakKind.ROUTED_ELSEWHERE: "Nothing to edit: the request went where its prefix was not, since waiting would have "
    "taken longer, or policy said so.",
    BreakKind.RESTARTED: "Nothing to edit: the engine that had the prefix began anew.",
    BreakKind.BELOW_MINIMUM: "Nothing to edit: prompts this short are not cached there.",
}


def repair(kind: BreakKind, change: PromptChange | None) -> str:
    """Return what to do about a break; what is not known has no repair."""
    if change is not None and change.kind is kind and kind in _AT:
        where = f"{change.path} [{change.start}:{change.end}]"
        return _AT[kind].format(path=change.path, where=where)
    return _OURS.get(kind, "")
