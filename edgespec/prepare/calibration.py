"""A calibration prompt and the model's greedy reply to it, used for measurements."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from edgespec.backends.base import LanguageModel, Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.engine.tree import TokenTree
from edgespec.errors import TemplateError

__all__ = ["calibration_prompt", "greedy_reply"]

_PROMPT = (
    "Write a short Python function that counts the words of a text file, with a docstring, and explain in"
    " two sentences how it works. Then list three ways in which it could fail, such as a file that is not"
    " there or one that is no text, and say for each of them what the function should do instead."
)
_MAX_PROMPT_TOKENS = 128
_MAX_REPLY_TOKENS = 96


def calibration_prompt(vocabulary: Vocabulary) -> list[int]:
    """Tokenize the calibration prompt, using the model's chat template if it has one."""
    if vocabulary.chat_template:
        try:
            arguments = vocabulary.chat_template, vocabulary.bos_text, vocabulary.eos_text
            with closing(ChatTemplate(*arguments)) as template:
                text = template.render([Message("user", _PROMPT)])
            return vocabulary.tokenize(text, special=True, start=False)[-_MAX_PROMPT_TOKENS:]
        except TemplateError:
            pass  # If the chat template fails, use the prompt without it.
    return vocabulary.tokenize(_PROMPT, special=False, start=True)[:_MAX_PROMPT_TOKENS]


def greedy_reply(model: LanguageModel, prompt: Sequence[int]) -> list[int]:
    """Return the model's greedy reply to a prompt, limited by the context size.

    The KV cache must be empty before the call. Afterwards, it contains the prompt and the reply.
    """
    model.prefill(prompt[:-1])
    reply: list[int] = []
    token = prompt[-1]
    all_tokens = np.arange(model.facts.vocab_size)
    while len(reply) < _MAX_REPLY_TOKENS and model.free_tokens:
        token = int(model.verify(TokenTree.chain(token)).at(0, all_tokens).argmax())
        model.commit(())
        reply.append(token)
        if model.vocabulary.is_end(token):
            break
    return reply
