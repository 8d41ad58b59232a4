"""Errors that the server reports to clients, independent of the API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from edgespec.errors import (
    AttachmentError,
    BusyError,
    CancelledError,
    CapabilityError,
    ClosedError,
    ContextFullError,
    EdgespecError,
    MemoryBudgetError,
    ModelNotFoundError,
    OptionError,
    TemplateError,
    WorkerError,
    WorkerLostError,
    shorten,
)
from edgespec.options.settings import LOAD_OPTIONS
from edgespec.server.leniency.values import CONSTRAINT_HINT, asks_for_constraint
from edgespec.system.spelling import FOREIGN_NAMES, nearest

__all__ = ["ApiError", "api_error", "invalid_request", "unsupported_content", "validation_error"]

# Value of the Retry-After header in seconds, sent when the server is busy or stopping.
_RETRY_SECONDS = 5
# Maximum lengths in characters of a quoted value, and of a message that may quote longer values.
_MAX_SHOWN_CHARACTERS, _MAX_MESSAGE_CHARACTERS = 100, 500
# Matches the type names that pydantic adds to the error location of a union field.
_TYPE = re.compile(r"\[|-|^(?:str|int|float|bool|dict|[A-Z]\w*)$")


@dataclass(eq=False)
class ApiError(Exception):
    """An error to report to the client. Each API formats it in its own way.

    Attributes:
        status: The HTTP status.
        message: What failed, with the value, and what to do.
        kind: The OpenAI error type, such as `invalid_request_error`.
        code: A machine-readable name, such as `model_not_found`. For an `EdgespecError`, its code.
        param: The request field that caused the error.
        details: Additional machine-readable values, such as the number of tokens in the prompt.
        headers: HTTP headers of the response.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str = "invalid_request"
    param: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def invalid_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """Return the error for an invalid request, with status 400."""
    return ApiError(400, message, code=code, param=param)


def unsupported_content(kind: str, *, param: str) -> ApiError:
    """Return the error for an unsupported content part, such as audio."""
    return invalid_request(
        f"{param} has type {kind[:40]!r}, but edgespec's models accept only text and, in user messages,"
        " images; remove it, or describe it in words",
        param=param,
        code="unsupported_content",
    )


def api_error(error: Exception, prompt_field: str | None = None) -> ApiError:
    """Convert an exception from a request handler to the error that is sent to the client.

    Args:
        error: The exception.
        prompt_field: Name of the request field that contains the prompt.
    """
    retry = {"Retry-After": str(_RETRY_SECONDS)}
    match error:
        case ApiError():
            return error
        case ContextFullError():
            return _context_error(error, prompt_field)
        case ModelNotFoundError():
            return ApiError(404, str(error), code=error.code, param="model")
        case MemoryBudgetError():
            return ApiError(400, str(error), code=error.code, param="model")
        case AttachmentError() | OptionError() | TemplateError() | CapabilityError():
            return invalid_request(
                shorten(error, _MAX_MESSAGE_CHARACTERS), param=error.option or None, code=error.code
            )
        case BusyError():
            return ApiError(429, str(error), "rate_limit_error", error.code, headers=retry)
        case ClosedError() | CancelledError():
            message = "the server is stopping or unloading this model; send the request again"
            return ApiError(503, message, "server_error", "unavailable", headers=retry)
        case WorkerError() | WorkerLostError():
            return ApiError(503, str(error), "server_error", error.code, headers=retry)
        case EdgespecError():
            return ApiError(500, str(error), "server_error", error.code)
        case _:
            message = "the server failed because of a bug; see its log for details"
            return ApiError(500, message, "server_error", "internal_error")


def _context_error(error: ContextFullError, prompt_field: str | None) -> ApiError:
    code, kind = error.code, "exceed_context_size_error"
    if error.prompt_tokens is None or error.context_tokens is None:
        return ApiError(400, str(error), kind, code, prompt_field)
    # Use OpenAI's wording for prompts that exceed the context. opencode and programs that use LiteLLM
    # recognise it and shorten the conversation.
    message = (
        f"{error.what}; this model's maximum context length is {error.context_tokens} tokens, so shorten it,"
        " or start the server with a larger --context"
    )
    details = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
    return ApiError(400, message, kind, code, prompt_field, details)


def validation_error(
    error: ValidationError, known: Sequence[str], advice: Mapping[str, str] = MappingProxyType({})
) -> ApiError:
    """Convert the first problem that pydantic found in a request body to an error for the client.

    Args:
        error: The exception.
        known: Names of the fields that the endpoint supports, used to suggest corrections of misspelt names.
        advice: Advice for fields that only other endpoints support, keyed by field name.
    """
    problems = error.errors(include_url=False)
    # Report fields that belong to other endpoints first, because they explain why a required field is
    # missing.
    elsewhere = (each for each in problems if _place(each["loc"]) in advice)
    first = _place(next(elsewhere, problems[0])["loc"])
    # For a union field, pydantic reports an error for each type. Pick the most deeply nested one, because the
    # client probably meant the type for which only part of the value is wrong.
    same_field = [each for each in problems if f"{_place(each['loc'])}.".startswith(f"{first}.")]
    problem = max(same_field, key=lambda each: _place(each["loc"]).count("."))
    place = _place(problem["loc"])
    if problem["type"] == "extra_forbidden":
        # Keep the last part of the path even if it looks like a type name, because it comes from the request.
        place = ".".join(filter(None, (_place(problem["loc"][:-1]), str(problem["loc"][-1]))))
    if isinstance(wrong := problem.get("ctx", {}).get("error"), OptionError):
        return invalid_request(shorten(wrong, _MAX_MESSAGE_CHARACTERS), param=place, code=wrong.code)
    if problem["type"] == "extra_forbidden":
        near = _near(place[:_MAX_SHOWN_CHARACTERS], known)
        option = FOREIGN_NAMES.get(place, place)
        if place in advice:
            hint = advice[place]
        elif option in LOAD_OPTIONS:
            flag = f"--{option.replace('_', '-')}"
            hint = f"it is set when a model is loaded, so start the server with {flag}"
        elif place == "keep_alive":
            hint = "it applies to all models alike, so start the server with --idle-unload"
        elif not near and asks_for_constraint(place, problem["input"]):
            hint = f"it seems to constrain the answer, so the server does not ignore it: {CONSTRAINT_HINT}"
        else:
            hint = f"did you mean {' or '.join(near)}?" if near else "leave it out"
        return invalid_request(
            f"unknown field {_shown(place)}; {hint}",
            param=place[:_MAX_SHOWN_CHARACTERS],
            code="unknown_field",
        )
    if not place:
        return invalid_request(
            "the request body must be a JSON object; enclose its fields in braces", code="invalid_json"
        )
    if problem["type"] == "too_short" and not problem["input"]:
        return invalid_request(f"{place} is empty; add at least one item", param=place)
    messages = [
        # Pydantic adds a prefix to the messages of the errors that our own checks raise.
        str(each["ctx"]["error"]) if each["type"] == "value_error" else each["msg"]
        for each in problems
        if _place(each["loc"]) == place
    ]
    message = ", or ".join(text[:1].lower() + text[1:] for text in dict.fromkeys(messages))
    given = "" if problem["type"] == "missing" else f", not {_shown(problem['input'])}"
    code = "missing_field" if problem["type"] == "missing" else "invalid_request"
    return invalid_request(f"{place}: {message}{given}", param=place, code=code)


def _near(place: str, known: Sequence[str]) -> list[str]:
    """Return similarly named fields of the same object. For a top-level field, also search nested objects."""
    parent, _, name = place.rpartition(".")
    fields = {
        each.rpartition(".")[2]: each for each in known if each.startswith(f"{parent}." if parent else "")
    }
    return [fields[each] for each in nearest(name, fields)]


def _place(path: tuple[int | str, ...]) -> str:
    """Return the path of the invalid field, such as `messages.0.content`, without type names."""
    return ".".join(str(part) for part in path if not _TYPE.search(str(part)))


def _shown(value: Any) -> str:
    return shorten(repr(value), _MAX_SHOWN_CHARACTERS)
