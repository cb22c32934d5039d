"""Agreement: whether an engine counts the tokens of a prompt as we do, told as a rate for each model.

A model whose template or tokenizer here is not the engine's counts differently again and again, and its hashes are then
worth nothing. One odd request says nothing: the verdict needs many answers, and a share of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AgreementOptions:
    """When to stop trusting, and when to trust again. Shares are of the answers in the window."""

    window: int = 64
    least_answers: int = 16
    """No verdict on fewer."""
    distrust_share: float = 0.25
    trust_share: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.trust_share < self.distrust_share <= 1 or not 1 < self.least_answers <= self.window:
            raise ValueError("the share to trust again must be below the one to distrust, and the window must fit both")
        if self.least_answers * self.distrust_share <= 1:
            raise ValueError("a single answer must not decide: raise the least number of answers or the share")


@dataclass(frozen=True, slots=True)
class AgreementState:
    """One model at one moment."""

    answers: int
    disagreements: int
    is_trusted: bool

    @property
    def disagreement_rate(self) -> float:
        """The share of answers in the window that disagree."""
        return self.disagreements / self.answers if self.answers else 0.0


class Agreement:
    """The verdict on each model, from its last answers. Pure; O(1) an answer."""

    def __init__(self, options: AgreementOptions | None = None) -> None:
        self._options = options or AgreementOptions()
        self._answers: dict[str, deque[bool]] = {}
        self._distrusted: set[str] = set()

    def answered(self, model: str, *, agrees: bool) -> bool:
        """Take one answer in; return whether the verdict changed by it."""
        options = self._options
        answers = self._answers.setdefault(model, deque(maxlen=options.window))
        answers.append(agrees)
        share = answers.count(False) / len(answers)
        if model in self._distrusted:
            if len(answers) >= options.least_answers and share <= options.trust_share:
                self._distrusted.discard(model)
                return True
        elif len(answers) >= options.least_answers and share >= options.distrust_share:
            self._distrusted.add(model)
            return True
        return False

    def is_trusted(self, model: str) -> bool:
        """Tell whether our counts of this model's prompts are its engines' counts, as far as is known."""
        return model not in self._distrusted

    def is_verified(self, model: str) -> bool:
        """Tell whether an engine counted as we do lately, and hardly one did otherwise: enough to send it our ids."""
        state = self.state(model)
        agreed = state.answers - state.disagreements
        return state.is_trusted and agreed > 0 and state.disagreement_rate <= self._options.trust_share

    def state(self, model: str) -> AgreementState:
        """Return the window's counts and the verdict."""
        answers = self._answers.get(model, ())
        return AgreementState(len(answers), list(answers).count(False), self.is_trusted(model))

    def forget(self, model: str) -> None:
        """Begin anew, as after another tokenizer or template was loaded."""
        self._answers.pop(model, None)
        self._distrusted.discard(model)
