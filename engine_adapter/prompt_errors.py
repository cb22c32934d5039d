"""The errors of prompts.

PromptError      these messages cannot be made a prompt: the client's mistake, a 400 at the edge
TemplateError    a chat template that is unknown or does not compile: a mistake of the configuration
"""

from __future__ import annotations


class PromptError(Exception):
    """The messages or tools cannot be rendered or encoded. ``param`` names the request's field that is wrong."""

    def __init__(self, message: str, *, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class TemplateError(Exception):
    """No such template, or one that does not compile."""
