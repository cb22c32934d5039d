"""Resumption: rendering a longer conversation from where a shorter one ended, and only where that is the same text.

A chat template is a program that walks over the messages. What it writes for message i follows from the message, from
the variables it entered its loop with, and from what it carries from one turn of the loop to the next, which in Jinja
can be namespaces only. So a *loop state* (those values at a turn's start) lets the loop go on at that turn, provided
that the loop is entered with the same values and the same text before it, and that no earlier turn looked at anything
that the new messages change: the conversation's length, its end, or "the last message" (such a turn is *unsettled*).

Nothing of this is assumed of a template. Its loop over the messages is rewritten, before it is compiled, to ask this
module for its items; the module hands out a ``loop`` and a view of the messages that note what is read, and compares
the values at the loop's entry. A template that rewrites history (Qwen3 drops the reasoning of earlier turns when the
user speaks again) enters its loop with another value, and is rendered from the start.

What stands before the loop is rendered anew each time for that comparison, unless all it read of the conversation were
single messages from its beginning: then it cannot come out differently and is left out as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast, overload

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

Frozen: TypeAlias = object
"""A value made comparable: equal exactly when a template cannot tell the originals apart."""

_ITEMS, _LOOP = "keepwarm_items", "keepwarm_loop"
_UNSTEADY_GLOBALS = frozenset({"strftime_now", "cycler", "joiner", "lipsum"})
_NO_VALUE = ("undefined",)


@dataclass(frozen=True, slots=True)
class _Start:
    """A view of all messages from here on."""

    start: int


class _Opaque(Exception):
    """A value that cannot be compared."""


class LoopState(msgspec.Struct, frozen=True):
    """A template at the start of a turn of its loop over the messages."""

    head: str
    """The text before the loop."""
    entry: Frozen
    """What the loop was entered with."""
    position: int
    """The message that the next turn takes; all earlier turns are settled."""
    carried: Mapping[str, Mapping[str, object]]
    """The namespaces' values, by name."""
    variables: Mapping[str, object] | None
    """What is set before the loop, where that needn't be rendered again: plain values, and starts of views."""


class Rendering(msgspec.Struct, frozen=True):
    """A rendered conversation in three parts; ``head`` and ``settled`` are left out when it was resumed there."""

    head: str
    settled: str
    rest: str
    state: LoopState | None
    """Where the next rendering can go on: after ``settled``. ``None`` where it cannot."""
    resumed: bool

    @property
    def text(self) -> str:
        """What was rendered now."""
        return self.head + self.settled + self.rest if not self.resumed else self.settled + self.rest


class ResumableTemplate:
    """A template whose loop over the messages can be entered in the middle."""

    def __init__(self, source: str, environment: jinja2.Environment) -> None:
        """Compile ``source``; raises ``ValueError`` where there is no such loop.

        It is the last loop at the template's top level, without a condition, an ``else`` branch or recursion.
        """
        tree = environment.parse(source)
        loop, before = _find_loop(tree)
        macros = list(tree.find_all(nodes.Macro))
        if any(map(_is_unsteady, [*loop.body, *macros])):
            raise ValueError("the loop's text does not follow from the messages alone")
        assigned: set[str] = set().union(*map(_assigned, before))
        after = tree.body[tree.body.index(loop) + 1 :]
        self._compared = sorted(assigned & _names(loop.iter, *loop.body, *macros))
        self._kept = sorted(assigned & _names(*after) - set(self._compared))
        self._may_skip = not any(map(_is_unsteady, before))
        for node in loop.body:
            _rename_loop(node)
        loads = [nodes.List([nodes.Name(name, "load") for name in names]) for names in (self._compared, self._kept)]
        loop.iter = nodes.Call(nodes.Name(_ITEMS, "load"), [loop.iter, *loads], [], None, None)
        loop.target = nodes.Tuple([loop.target, nodes.Name(_LOOP, "store")], "store")
        self._whole = _compile(environment, tree)
        tree.body = [*(node for node in before if isinstance(node, nodes.Macro)), loop, *after]
        self._behind_start = _compile(environment, tree)
        # What ``Template.generate`` puts together anew for every rendering, which takes longer than a short rendering.
        self._globals = dict(self._whole.globals)
        self._global_names = set(self._globals)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
        state: LoopState | None,
    ) -> Rendering:
        """Render from ``state`` on where it holds, else from the start. Raises whatever the template raises."""
        run = _Run(messages, state, self._compared, self._kept, self._may_skip)
        template, given = self._whole, {**variables, "messages": run.view}
        if state is not None and state.variables is not None and state.position <= len(messages):
            template, given = self._behind_start, {**given, **run.restored(state)}
        given = {**self._globals, **given, _ITEMS: run.items}
        context = template.environment.context_class(template.environment, given, template.name, template.blocks)
        context.globals_keys = self._global_names
        for piece in template.root_render_func(context):
            run.pieces.append(piece)
        return run.rendering()


class _Run:
    """One rendering: what was written, and what each turn of the loop looked at."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, object]],
        state: LoopState | None,
        compared: Sequence[str],
        kept: Sequence[str],
        may_skip: bool,
    ) -> None:
        self.messages = messages
        self.pieces: list[str] = []
        self.view = _View(self, range(len(messages)))
        self._compared, self._kept = compared, kept
        self._state = state
        self._skipped = self._resumed = False
        self._turn: int | None = None  # the message of this turn; None outside of the loop
        self._is_before_loop, self._is_start_settled, self._is_settled = True, may_skip, True
        self._head = 0  # pieces before the loop
        self._entry: Frozen | None = None
        self._variables: Mapping[str, object] | None = None
        self._settled: tuple[int, int, Mapping[str, Mapping[str, object]]] | None = None

    def restored(self, state: LoopState) -> dict[str, object]:
        """Return the variables of ``state`` for a rendering that leaves out what stands before the loop."""
        self._skipped = True
        found: dict[str, object] = {name: Namespace(values) for name, values in state.carried.items()}
        for name, value in (state.variables or {}).items():
            found[name] = _View(self, range(value.start, len(self.messages))) if isinstance(value, _Start) else value
        return found

    def items(self, iterable: object, compared: list[object], kept: list[object]) -> Iterator[tuple[object, object]]:
        """Stand between the template's loop and its messages."""
        self._is_before_loop = False
        self._head = len(self.pieces)
        if not isinstance(iterable, _View) or not iterable.is_open:
            yield from self._all_items(iterable)
            return
        spaces = {
            name: value for name, value in zip(self._compared, compared, strict=True) if isinstance(value, Namespace)
        }
        if self._state is not None and self._skipped:
            self._entry, self._variables = self._state.entry, self._state.variables
            self._resumed = True
        else:
            try:
                self._entry = (_frozen(iterable), tuple(map(_frozen, compared)))
            except _Opaque:
                self._is_settled = False
            if self._is_start_settled and not any(isinstance(value, Namespace) for value in kept):
                self._variables = _captured(zip([*self._compared, *self._kept], [*compared, *kept], strict=True))
            self._resumed = self._resume(spaces, iterable.places.start)
        yield from self._turns(iterable, spaces)

    def _resume(self, spaces: Mapping[str, Namespace], start: int) -> bool:
        state = self._state
        if (
            state is None
            or not start <= state.position <= len(self.messages)
            or state.entry != self._entry
            or state.head != "".join(self.pieces)
        ):
            return False
        for name, space in spaces.items():
            _attributes(space).clear()
            _attributes(space).update(state.carried[name])
        return True

    def _turns(self, view: _View, spaces: Mapping[str, Namespace]) -> Iterator[tuple[object, object]]:
        start, end = view.places.start, len(self.messages)
        first = self._state.position if self._resumed and self._state is not None else min(start, end)
        loop = _Loop(self, view)
        for position in range(first, end):
            self._settle(position, spaces)
            self._turn, loop.index0 = position, position - start
            yield self.messages[position], loop
        self._settle(end, spaces)
        self._turn = None

    def _settle(self, position: int, spaces: Mapping[str, Namespace]) -> None:
        if self._is_settled:
            carried = {name: dict(_attributes(space)) for name, space in spaces.items()}
            self._settled = (position, len(self.pieces), carried)

    def unsettle(self) -> None:
        """Note that something was looked at that more messages can change."""
        if self._is_before_loop:
            self._is_start_settled = False
        elif self._turn is not None:
            self._is_settled = False

    def _all_items(self, iterable: object) -> Iterator[tuple[object, object]]:
        """Hand out every item of something that is not the conversation."""
        items = [] if isinstance(iterable, Undefined) else list(cast("Sequence[object]", iterable))
        loop = _Loop(self, self.view, items)
        for loop.index0, item in enumerate(items):
            yield item, loop

    def rendering(self) -> Rendering:
        """Return what came of it."""
        pieces, state, at = self.pieces, None, self._head
        head, entry = "".join(pieces[: self._head]), self._entry
        if self._resumed and self._state is not None:
            head, entry = self._state.head, self._state.entry  # the same objects, so that states in a row share them
        if self._settled is not None:
            position, at, carried = self._settled
            if all(map(_is_portable, carried.values())):
                state = LoopState(head, entry, position, carried, self._variables)
        return Rendering(head, "".join(pieces[self._head : at]), "".join(pieces[at:]), state, self._resumed)


class _View(Sequence[object]):
    """The messages, or a slice of them, noting what is read of them inside the loop."""

    __slots__ = ("_run", "places")

    def __init__(self, run: _Run, places: range) -> None:
        self._run, self.places = run, places

    @property
    def is_open(self) -> bool:
        """Whether this is all messages from some place on."""
        return self.places.step == 1 and self.places.stop == len(self._run.messages)

    @overload
    def __getitem__(self, key: int) -> object: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[object]: ...
    def __getitem__(self, key: int | slice) -> object:
        start = key if isinstance(key, int) else key.start if key.stop is None and key.step in (None, 1) else -1
        if not (self.is_open and isinstance(start, int) and 0 <= start < len(self.places)):
            self._run.unsettle()
        place = self.places[key]
        return _View(self._run, place) if isinstance(place, range) else self._run.messages[place]

    def __iter__(self) -> Iterator[object]:
        self._run.unsettle()
        messages, places = self._run.messages, self.places
        return iter(messages) if places == range(len(messages)) else iter([messages[place] for place in places])

    def __len__(self) -> int:
        self._run.unsettle()
        return len(self.places)

    def __eq__(self, other: object) -> bool:
        self._run.unsettle()
        return list(self) == (list(other) if isinstance(other, _View) else other)

    __hash__ = None  # type: ignore[assignment]  # a list has none either

    def __add__(self, other: Sequence[object]) -> list[object]:
        return [*self, *other]

    def __radd__(self, other: Sequence[object]) -> list[object]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))


def plain(value: object) -> object:
    """Return a view of the messages as the list that it stands for; anything else as it is. For JSON."""
    return list(value) if isinstance(value, _View) else value


class _Loop:
    """Jinja's ``loop``, noting when it tells something of the conversation's end."""

    depth, depth0 = 1, 0

    def __init__(self, run: _Run, view: _View, fixed: list[object] | None = None) -> None:
        self._run, self._view = run, view
        self._fixed = fixed  # items that are no view of the messages
        self.index0 = 0

    def _items(self) -> Sequence[object]:
        if self._fixed is not None:
            return self._fixed
        places = self._view.places
        return self._run.messages[places.start :] if places.start else self._run.messages

    @property
    def index(self) -> int:
        return self.index0 + 1

    @property
    def first(self) -> bool:
        return self.index0 == 0

    @property
    def last(self) -> bool:
        is_last = self.index0 == self._count() - 1
        if is_last:
            self._run.unsettle()
        return is_last

    @property
    def length(self) -> int:
        self._run.unsettle()
        return self._count()

    @property
    def revindex0(self) -> int:
        return self.length - self.index0 - 1

    @property
    def revindex(self) -> int:
        return self.length - self.index0

    @property
    def previtem(self) -> object:
        return self._items()[self.index0 - 1] if self.index0 else Undefined("there is no previous item")

    @property
    def nextitem(self) -> object:
        return Undefined("there is no next item") if self.last else self._items()[self.index0 + 1]

    def cycle(self, *values: object) -> object:
        return values[self.index0 % len(values)]

    def _count(self) -> int:
        return len(self._fixed) if self._fixed is not None else len(self._view.places)


def _frozen(value: object) -> Frozen:
    """Return ``value`` as something that compares by type and content. Raises ``_Opaque``."""
    if value is None or type(value) in (str, int, bool):
        return (type(value), value)
    if type(value) is float:
        return (float, repr(value))  # 0.0 and -0.0 are equal and are written differently
    if isinstance(value, Undefined):
        return _NO_VALUE
    if isinstance(value, _View):
        places = value.places
        if places.step != 1:
            return ("view", places.start, places.stop, places.step)
        return ("view", places.start, None if value.is_open else places.stop)
    if isinstance(value, Namespace):
        return ("namespace", _frozen(_attributes(value)))
    if type(value) is dict:
        return ("object", tuple((name, _frozen(item)) for name, item in value.items()))
    if type(value) in (list, tuple):
        return (type(value), tuple(map(_frozen, cast("list[object]", value))))
    if isinstance(value, Macro):
        return ("macro",)  # its text is the template's, and what it reads from outside is compared under its own name
    raise _Opaque


def _is_portable(value: object) -> bool:
    """Tell whether a carried value means the same in another rendering: everything plain does, a view does not."""
    if type(value) is dict:
        return all(map(_is_portable, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_portable, cast("list[object]", value)))
    return value is None or type(value) in (str, int, float, bool)


def _attributes(space: Namespace) -> dict[str, object]:
    return cast("dict[str, object]", object.__getattribute__(space, "_Namespace__attrs"))


def _find_loop(tree: nodes.Template) -> tuple[nodes.For, list[nodes.Node]]:
    """Return the loop over the messages and the nodes before it. Raises ``ValueError``."""
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if not loops or any(True for _ in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))):
        raise ValueError("there is no loop over the messages")
    loop = loops[-1]
    if loop.recursive or loop.test is not None or loop.else_ or not isinstance(loop.target, nodes.Name):
        raise ValueError("the loop over the messages is of a kind that cannot be resumed")
    return loop, tree.body[: tree.body.index(loop)]


def _compile(environment: jinja2.Environment, tree: nodes.Template) -> jinja2.Template:
    return environment.from_string(tree.set_environment(environment))  # type: ignore[arg-type]  # it takes trees too


def _captured(variables: Iterable[tuple[str, object]]) -> Mapping[str, object] | None:
    """Return what can be given to another rendering under the same names, ``None`` where that is not all of it.

    Namespaces and what is undefined are left out: the one is carried, the other stays undefined.
    """
    found: dict[str, object] = {}
    spaces: list[object] = []
    for name, value in variables:
        if isinstance(value, Namespace):
            if any(value is other for other in spaces):
                return None  # one under two names would become two
            spaces.append(value)
        elif isinstance(value, _View):
            if not value.is_open:
                return None
            found[name] = _Start(value.places.start)
        elif _is_portable(value):
            found[name] = value
        elif not isinstance(value, Undefined | Macro):
            return None
    return found


def _names(*found_in: nodes.Node) -> set[str]:
    """Return every name that is read or written in the nodes, namespaces included."""
    found: set[str] = set()
    for node in found_in:
        found |= {name.name for name in node.find_all(nodes.Name)} | {ref.name for ref in node.find_all(nodes.NSRef)}
        if isinstance(node, nodes.Name):
            found.add(node.name)
    return found


def _assigned(node: nodes.Node) -> set[str]:
    """Return the names that ``node`` sets, itself or in what it contains."""
    found: set[str] = set()
    for inner in [node, *node.find_all((nodes.Assign, nodes.AssignBlock, nodes.Macro))]:
        if isinstance(inner, nodes.Macro):
            found.add(inner.name)
        elif isinstance(inner, nodes.Assign | nodes.AssignBlock):
            target = inner.target
            found |= {target.name} if isinstance(target, nodes.Name) else _names(target)
    return found


def _is_unsteady(node: nodes.Node) -> bool:
    """Tell whether the node does what cannot be followed: look at a clock, roll dice, remember across turns."""
    return (
        bool(_names(node) & _UNSTEADY_GLOBALS)
        or any(call.attr == "changed" for call in node.find_all(nodes.Getattr))
        or any(call.name == "random" for call in node.find_all(nodes.Filter))
    )


def _rename_loop(node: nodes.Node) -> None:
    """Rename ``loop`` where it is the outer loop's: everywhere but in the body of an inner one."""
    if isinstance(node, nodes.Name):
        if node.name == "loop":
            node.name = _LOOP
    elif isinstance(node, nodes.For):
        _rename_loop(node.iter)
        for inner in node.else_:
            _rename_loop(inner)
    else:
        for child in node.iter_child_nodes():
            _rename_loop(child)
