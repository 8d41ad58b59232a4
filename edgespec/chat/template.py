"""Rendering of a model's chat template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.chat.message import Message
from edgespec.errors import TemplateError

__all__ = ["ChatTemplate"]

_RENDER_ERRORS = (JinjaError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """Renders messages with a model's Jinja template.

    Args:
        source: Source code of the template.
        bos_text: Text of the start token, which templates call `bos_token`.
        eos_text: Text of the end token, which templates call `eos_token`.

    Raises:
        TemplateError: The template does not compile.
    """

    def __init__(self, source: str, bos_text: str, eos_text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._tokens = {"bos_token": bos_text, "eos_token": eos_text}
        try:
            self._template = environment.from_string(source)
        except JinjaError as error:
            raise TemplateError(
                f"the model's chat template is broken: {error}",
                "use `edgespec generate --raw` or another model",
            ) from error

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt for the assistant's next reply. Raises TemplateError."""
        try:
            return self._template.render(
                messages=[message.for_template() for message in messages],
                add_generation_prompt=True,
                tools=None,
                **self._tokens,
            )
        except _RENDER_ERRORS as error:
            folded = _without_system(messages)
            if folded is None:
                raise TemplateError(
                    f"the model's chat template rejects these messages: {error}", "change or shorten the chat"
                ) from error
        # Some templates, such as Gemma's, have no system role. Prepend the system prompt to the first message
        # instead.
        return self.render(folded)


def _without_system(messages: Sequence[Message]) -> list[Message] | None:
    """Move the system prompt into the first message. Return None if there is no system prompt."""
    if len(messages) < 2 or messages[0].role != "system":
        return None
    first = messages[1]
    return [replace(first, content=f"{messages[0].content}\n\n{first.content}"), *messages[2:]]


def _refuse(message: str) -> NoReturn:
    raise JinjaError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
