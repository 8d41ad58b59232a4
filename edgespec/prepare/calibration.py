"""A short text to measure a model on: a request, and what the model itself says to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgespec.backends.base import LanguageModel, Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.engine.tree import TokenTree
from edgespec.errors import TemplateError

__all__ = ["calibration_prompt", "greedy_reply"]

_TEXT = (
    "Write a short Python function that counts the words of a text file, with a docstring, and explain in"
    " two sentences how it works. Then list three ways in which it could fail, such as a file that is not"
    " there or one that is no text, and say for each of them what the function should do instead."
)
_MOST_TOKENS = 128
_REPLY_TOKENS = 96


def calibration_prompt(vocabulary: Vocabulary) -> list[int]:
    """The tokens of a request, in the model's own chat template where it has one; the reply comes next."""
    if vocabulary.chat_template:
        try:
            template = ChatTemplate(vocabulary.chat_template, vocabulary.bos_text, vocabulary.eos_text)
            text = template.render([Message("user", _TEXT)])
            return vocabulary.tokenize(text, special=True, start=False)[-_MOST_TOKENS:]
        except TemplateError:
            pass  # the bare text tells nearly as much
    return vocabulary.tokenize(_TEXT, special=False, start=True)[:_MOST_TOKENS]


def greedy_reply(model: LanguageModel, request: Sequence[int]) -> list[int]:
    """What a model with an empty cache says, as far as its context goes; both stay in its cache."""
    model.prefill(request[:-1])
    reply: list[int] = []
    token = request[-1]
    everything = np.arange(model.facts.vocab_size)
    while len(reply) < _REPLY_TOKENS and model.free_tokens:
        token = int(model.verify(TokenTree.chain(token)).at(0, everything).argmax())
        model.commit(())
        reply.append(token)
        if model.vocabulary.is_end(token):
            break
    return reply
