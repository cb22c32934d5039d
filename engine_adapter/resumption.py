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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast, overload

import jinja2
from jinja2 import nodes
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace

Frozen: TypeAlias = object
"""A value made comparable: equal exactly when a template cannot tell the originals apart."""

_ITEMS, _LOOP = "keepwarm_items", "keepwarm_loop"
_UNTRACKED_GLOBALS = frozenset({"strftime_now", "cycler", "joiner", "lipsum"})
_NO_VALUE = ("undefined",)


class _Opaque(Exception):
    """A value that cannot be compared."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """A template at the start of a turn of its loop over the messages."""

    head: str
    """The text before the loop."""
    entry: Frozen
    """What the loop was entered with."""
    position: int
    """The message that the next turn takes; all earlier turns are settled."""
    carried: tuple[Mapping[str, object] | None, ...]
    """The namespaces' values, in the order of the loop's names."""


@dataclass(frozen=True, slots=True)
class Rendering:
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


def open_loop(tree: nodes.Template) -> bool:
    """Rewrite the template's loop over its messages so that it can be resumed; ``False`` where it has no such loop.

    It is the last loop at the template's top level, and must have no condition, no ``else`` branch and no recursion.
    """
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if not loops or any(True for _ in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))):
        return False
    loop = loops[-1]
    if loop.recursive or loop.test is not None or loop.else_ or not isinstance(loop.target, nodes.Name):
        return False
    inside = [*loop.body, *tree.find_all(nodes.Macro)]
    read = {name for node in inside for name in _names(node)}
    if read & _UNTRACKED_GLOBALS or any(_is_unsteady(node) for node in inside):
        return False
    before = tree.body[: tree.body.index(loop)]
    assigned: set[str] = set().union(*map(_assigned, before))
    for node in loop.body:
        _rename_loop(node)
    visible = [nodes.Name(name, "load") for name in sorted(read & assigned)]
    loop.iter = nodes.Call(nodes.Name(_ITEMS, "load"), [loop.iter, nodes.List(visible)], [], None, None)
    loop.target = nodes.Tuple([loop.target, nodes.Name(_LOOP, "store")], "store")
    return True


def render_resumable(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, object]],
    variables: Mapping[str, object],
    state: LoopState | None,
) -> Rendering:
    """Render a template whose loop is open, from ``state`` where it holds. Raises whatever the template raises."""
    run = _Run(messages, state)
    for piece in template.generate(**variables, messages=run.view, **{_ITEMS: run.items}):
        run.pieces.append(piece)
    return run.rendering()


class _Run:
    """One rendering: what was written, and what each turn of the loop looked at."""

    def __init__(self, messages: Sequence[Mapping[str, object]], state: LoopState | None) -> None:
        self.messages = messages
        self.pieces: list[str] = []
        self.view = _View(self, range(len(messages)))
        self.turn: int | None = None  # the message of this turn; None outside of the loop
        self._state = state
        self._resumed = False
        self._entry: Frozen | None = None
        self._head = 0  # pieces before the loop
        self._settled: tuple[int, int, tuple[Mapping[str, object] | None, ...]] | None = None
        self._is_settled = True

    def items(self, iterable: object, visible: list[object]) -> Iterator[tuple[object, object]]:
        """Stand between the template's loop and its messages."""
        self._head = len(self.pieces)
        is_ours = isinstance(iterable, _View) and iterable.is_open
        try:
            self._entry = (_frozen(iterable), tuple(map(_frozen, visible))) if is_ours else None
        except _Opaque:
            self._entry = None
        if not isinstance(iterable, _View) or self._entry is None:
            loop = _Loop(self, iterable if isinstance(iterable, _View) else _View(self, range(0)))
            yield from _all_items(iterable, loop)
            return
        spaces = [value if isinstance(value, Namespace) else None for value in visible]
        yield from self._turns(iterable, spaces)

    def _turns(self, view: _View, spaces: list[Namespace | None]) -> Iterator[tuple[object, object]]:
        start, end = view.places.start, len(self.messages)
        state = self._state
        if (
            state is not None
            and start <= state.position <= end
            and state.entry == self._entry
            and state.head == "".join(self.pieces)
        ):
            self._resumed, first = True, state.position
            for space, carried in zip(spaces, state.carried, strict=True):
                if space is not None and carried is not None:
                    _attributes(space).clear()
                    _attributes(space).update(carried)
        else:
            first = min(start, end)
        loop = _Loop(self, view)
        for position in range(first, end):
            self._settle(position, spaces)
            self.turn, loop.index0 = position, position - start
            yield self.messages[position], loop
        self._settle(end, spaces)
        self.turn = None

    def _settle(self, position: int, spaces: list[Namespace | None]) -> None:
        if self._is_settled:
            carried = tuple(None if space is None else dict(_attributes(space)) for space in spaces)
            self._settled = (position, len(self.pieces), carried)

    def unsettle(self) -> None:
        """Note that this turn looked at something that more messages can change."""
        if self.turn is not None:
            self._is_settled = False

    def rendering(self) -> Rendering:
        """Return what came of it."""
        pieces, state, at = self.pieces, None, self._head
        head, entry = "".join(pieces[: self._head]), self._entry
        if self._resumed and self._state is not None:
            head, entry = self._state.head, self._state.entry  # the same objects, so that states in a row share them
        if self._settled is not None:
            position, at, carried = self._settled
            if all(map(_is_portable, carried)):
                state = LoopState(head, entry, position, carried)
        return Rendering(head, "".join(pieces[self._head : at]), "".join(pieces[at:]), state, self._resumed)


def _all_items(iterable: object, loop: _Loop) -> Iterator[tuple[object, object]]:
    """Hand out every item of something that is not the conversation."""
    items = list(cast("Sequence[object]", iterable)) if not isinstance(iterable, Undefined) else []
    loop.fixed = items
    for loop.index0, item in enumerate(items):
        yield item, loop


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
        turn = self._run.turn
        if turn is not None:
            is_steady = isinstance(key, int) and key >= 0 and self.is_open and key < len(self.places)
            if not is_steady:
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

    def __init__(self, run: _Run, view: _View) -> None:
        self._run, self._view = run, view
        self.index0 = 0
        self.fixed: list[object] | None = None  # items that are no view of the messages

    def _items(self) -> Sequence[object]:
        if self.fixed is not None:
            return self.fixed
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
        return len(self.fixed) if self.fixed is not None else len(self._view.places)


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


def _names(node: nodes.Node) -> set[str]:
    """Return every name that is read or written in ``node``, namespaces included."""
    found = {name.name for name in node.find_all(nodes.Name)} | {ref.name for ref in node.find_all(nodes.NSRef)}
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
    """Tell whether the node does what cannot be followed: ``loop.changed`` remembers, ``random`` is."""
    return any(True for call in node.find_all(nodes.Getattr) if call.attr == "changed") or any(
        True for call in node.find_all(nodes.Filter) if call.name == "random"
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
