"""Model names: what clients may call them, and what instances call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from gateway.errors import Forbidden, NoInstance, NotFound
from gateway.identity import Caller


class SpecialTokens(StrEnum):
    """What is done with text in a conversation that spells a special token, such as ``<|im_start|>``."""

    LITERAL = "literal"  # it stays ordinary text: by token ids where the engine takes them, else like ``ESCAPE``
    ESCAPE = "escape"  # an invisible character is put into it
    REJECT = "reject"  # the request is refused
    PASS = "pass"  # it goes to the engine as it came, which may take it for the token


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What is configured of one model; see ``gateway.settings.ModelSettings``."""

    name: str
    aliases: tuple[str, ...] = ()
    tokenizer: str = "auto"
    template: str | None = None
    counts_checked: bool = True
    special_tokens: SpecialTokens = SpecialTokens.LITERAL
    keeps_answers: bool = True
    """A quoted answer goes as the ids that were generated, where the engine takes ids and these say the same."""


class ModelDirectory:
    """Resolves names. Models need not be configured: whatever an instance serves can be asked for by its own name."""

    def __init__(
        self,
        configured: Iterable[ModelOptions],
        served: Callable[[], Iterable[str]],
        knows_all: Callable[[], bool] = lambda: True,
    ) -> None:
        """``served``: what instances serve, as far as they have said; ``knows_all``: whether all of them have."""
        self._configured = {options.name: options for options in configured}
        self._names = {alias: options.name for options in self._configured.values() for alias in options.aliases}
        self._served, self._knows_all = served, knows_all
        self._ever_served: set[str] = set()

    def options(self, model: str) -> ModelOptions:
        """Return what is configured of a model, or the defaults."""
        return self._configured.get(model) or ModelOptions(model)

    def resolve(self, asked: str, caller: Caller) -> str:
        """Return the served name.

        Raises ``Forbidden`` where the key does not allow the model, ``NotFound`` for one that nobody serves, and
        ``NoInstance``, which clients try again, while an instance has not said yet what it serves.
        """
        named = caller.aliases.get(asked, asked)
        model = self._names.get(named, named)
        if not (caller.may_use(asked) or caller.may_use(model)):
            raise Forbidden(f"this key may not use the model {asked!r}", param="model", code="model_not_allowed")
        if model not in self._configured and model not in self._known():
            if not self._knows_all():
                raise NoInstance(f"not every engine has started: {asked!r} may come", retry_after_s=5)
            raise _no_model(asked)
        return model

    def look_up(self, asked: str, caller: Caller) -> None:
        """Raise as ``resolve``, and ``NotFound`` for a model whose instances are all gone. Answers of such a one may be
        asked for still, since instances come back."""
        self.resolve(asked, caller)
        if asked not in self.visible(caller):
            raise _no_model(asked)

    def visible(self, caller: Caller) -> list[str]:
        """Return every name that the caller may ask for: of what is configured, and of what instances serve that are
        there, whether they are well or not."""
        names = {name: self._names.get(name, name) for name in (*self._configured, *self._names, *self._served())}
        names |= {alias: self._names.get(model, model) for alias, model in caller.aliases.items()}
        return sorted(name for name, model in names.items() if caller.may_use(name) or caller.may_use(model))

    def _known(self) -> set[str]:
        self._ever_served.update(self._served())  # a model whose instances are all down is unavailable, not unknown
        return self._ever_served


def _no_model(asked: str) -> NotFound:
    return NotFound(f"there is no model {asked!r} here", param="model", code="model_not_found")
