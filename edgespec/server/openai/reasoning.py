"""Request fields of other servers that turn the model's reasoning on or off."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from edgespec.server.fields import RequestFields

__all__ = ["ReasoningFields"]

_STATES = {"enabled": "on", "disabled": "off", True: "on", False: "off"}


class ReasoningFields(RequestFields):
    """The fields of OpenAI, OpenRouter, vLLM and DeepSeek for reasoning.

    Other settings in these fields, such as a low effort, are ignored.
    """

    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("thinking", mode="before", check_fields=False)
    @classmethod
    def _state(cls, value: Any) -> Any:
        """Accept DeepSeek's form of the option `thinking`, such as `{"type": "disabled"}`."""
        return _STATES.get(str(value.get("type")), value) if isinstance(value, dict) else value

    def reasoning_options(self) -> dict[str, Any]:
        """Return the reply option that the fields set, or an empty dictionary if they set none."""
        return {"thinking": state} if (state := next(iter(self._states().values()), None)) else {}

    def ignored_fields(self) -> list[str]:
        """Return the names of the ignored fields that the request sets."""
        states = self._states()
        names = [name for name in ReasoningFields.model_fields if getattr(self, name) and name not in states]
        return [*super().ignored_fields(), *names]

    def _states(self) -> dict[str, str]:
        """Return `on` or `off` for each field that sets it."""
        template, reasoning = self.chat_template_kwargs or {}, self.reasoning or {}
        enabled = reasoning.get("enabled")
        given = {
            "reasoning_effort": False if self.reasoning_effort == "none" else None,
            "reasoning": False if reasoning.get("effort") == "none" else enabled,
            "chat_template_kwargs": template.get("enable_thinking", template.get("thinking")),
        }
        return {name: _STATES[value] for name, value in given.items() if isinstance(value, bool)}
