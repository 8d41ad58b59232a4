"""A short text to measure a model on."""

from __future__ import annotations

from edgespec.backends.base import Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.errors import TemplateError

__all__ = ["calibration_tokens"]

_TEXT = (
    "Write a short Python function that counts the words of a text file, with a docstring, and explain in"
    " two sentences how it works. Then list three ways in which it could fail, such as a file that is not"
    " there or one that is no text, and say for each of them what the function should do instead."
)
_MOST_TOKENS = 128


def calibration_tokens(vocabulary: Vocabulary) -> list[int]:
    """The tokens of a request, in the model's own chat template where it has one; the reply comes next."""
    if vocabulary.chat_template:
        try:
            template = ChatTemplate(vocabulary.chat_template, vocabulary.start_text, vocabulary.end_text)
            text = template.render([Message("user", _TEXT)])
            return vocabulary.tokenize(text, special=True, start=False)[-_MOST_TOKENS:]
        except TemplateError:
            pass  # the bare text tells nearly as much
    return vocabulary.tokenize(_TEXT, special=False, start=True)[:_MOST_TOKENS]
