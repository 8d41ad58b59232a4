"""A calibration prompt for measurements, in the model's chat format."""

from __future__ import annotations

from contextlib import closing

from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.errors import TemplateError
from edgespec.model.base import Vocabulary

_PROMPT = (
    "Write a short Python function that counts the words of a text file, with a docstring, and explain in"
    " two sentences how it works. Then list three ways in which it could fail, such as a file that is not"
    " there or one that is no text, and say for each of them what the function should do instead."
)
_MAX_PROMPT_TOKENS = 128


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
