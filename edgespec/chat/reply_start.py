"""Format a partial reply in the model's own chat format, so that the model continues it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgespec.chat.message import Message
from edgespec.chat.reasoning import REASONING_MARKERS, leading_marker, opening_marker
from edgespec.errors import OptionError

__all__ = ["fitted_to_prompt", "messages_to_answer", "text_to_continue", "whole_characters"]

# A reply truncated in the middle of a character ends with U+FFFD or a lone surrogate.
_PART_OF_CHARACTER = re.compile("[\ufffd\ud800-\udfff]+\\Z")
# Markers that models write on their own line. Other markers have no whitespace around them.
_ON_OWN_LINE = ("<think>", "<|channel>thought")


def whole_characters(text: str) -> str:
    """Return the text without an incomplete trailing character, which the model will regenerate."""
    return _PART_OF_CHARACTER.sub("", text)


def messages_to_answer(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """Split a conversation into the messages to reply to and the start of that reply.

    Returns:
        The messages up to the last one from the user or a tool, and the text of the partial reply after it,
        which is empty if there is none.

    Raises:
        OptionError: No message is from the user or a tool, or the partial reply calls tools.
    """
    end = len(messages)
    while end and messages[end - 1].role not in ("user", "tool"):
        end -= 1
    if not end:
        raise OptionError(
            "there is no user message to answer", "send a message first", code="messages_invalid"
        )
    reply_start = text_to_continue(messages[end:]) if end < len(messages) else ""
    return list(messages[:end]), reply_start


def text_to_continue(messages: Sequence[Message]) -> str:
    """Return the text of the partial reply that the model should continue.

    Args:
        messages: The assistant messages at the end of a conversation. If there are several, they are parts of
            one reply.

    Raises:
        OptionError: A message calls tools, so tool results must come next.
    """
    for call in (call for message in messages for call in message.tool_calls):
        raise OptionError(
            f"the last message calls the tool {call.name[:80]!r}, but its result is missing",
            "add a message with the role `tool` for each call, or remove the calls",
            code="messages_invalid",
        )
    if len(messages) == 1:
        return whole_characters(messages[0].text)
    reasoning = "\n\n".join(message.reasoning for message in messages if message.reasoning)
    content = "".join(message.content for message in messages)
    return whole_characters(Message("assistant", content, reasoning).text)


def fitted_to_prompt(text: str, prompt: str, template: str) -> str:
    """Return the text to append to a prompt so that the reply begins with `text`.

    Args:
        text: The start of the reply. It may begin with reasoning in any model's markers.
        prompt: The rendered prompt, which may end with a marker that opens the reasoning.
        template: The source of the chat template, which contains the model's own markers.
    """
    opening, leading = opening_marker(prompt), leading_marker(text)
    closes = REASONING_MARKERS.get(leading.strip(), "")
    if closes:
        return _with_own_reasoning(text, leading, opening, template)
    if opening:
        close = REASONING_MARKERS[opening.strip()]
        # The prompt has already opened the reasoning. If the text does not close it, the text is an answer,
        # so close the reasoning first.
        return text if close in text else _closing(opening) + text
    if leading:
        return text
    # gpt-oss writes the answer in a separate channel.
    answers = [marker for marker, close in REASONING_MARKERS.items() if not close and marker in template]
    return next((f"{marker}{text}" for marker in answers if not prompt.endswith(marker)), text)


def _with_own_reasoning(text: str, leading: str, opening: str, template: str) -> str:
    """Replace the reasoning markers in `text` with the model's own.

    Args:
        text: The start of a reply.
        leading: The opening marker of `text`, with whitespace.
        opening: The opening marker at the end of the prompt, with whitespace. It is not repeated.
        template: The source of the chat template.
    """
    given = leading.strip()
    known = [marker for marker, close in REASONING_MARKERS.items() if close and marker in template]
    own = opening.strip() or (known[0] if known and given not in known else given)
    rest = text[len(leading) :]
    if own == given:
        return rest if opening else text
    reasoning, closed, answer = rest.partition(REASONING_MARKERS[given])
    begin = opening or (f"{own}\n" if own in _ON_OWN_LINE else own)
    end = _closing(begin) + answer.lstrip() if closed else ""
    return ("" if opening else begin) + (reasoning.rstrip() if closed else reasoning) + end


def _closing(opening: str) -> str:
    """Return the closing marker for an opening marker, with whitespace in the same style."""
    close = REASONING_MARKERS[opening.strip()]
    return f"\n{close}\n\n" if opening.endswith("\n") else close
