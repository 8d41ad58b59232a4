"""The kinds of option values used only by reply options: text files, JSON schemas and sampling values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from errno import EFBIG
from pathlib import Path
from typing import Any

from edgespec.engine.sampling_params import SETTING_RANGES, SamplingParams
from edgespec.errors import OptionError
from edgespec.options.option_kinds import Kind, converted
from edgespec.options.schemas.other_properties import closed_objects
from edgespec.options.schemas.spellings import read_schema
from edgespec.system.files import format_bytes

__all__ = ["JsonSchema", "SamplingNumber", "TextFile", "TokenBiases"]

# Maximum size of a text file in bytes, far more than a schema or a grammar needs. Without a limit, a path
# such as /dev/zero would exhaust memory.
_MAX_FILE_BYTES = 16 << 20


class TextFile(Kind):
    """A string, given on the command line as the path of a file that contains it."""

    metavar = "FILE"

    def parse(self, text: str) -> Any:
        """Return the text of a file. Raises OptionError if it cannot be read or is too large."""
        try:
            # The file may be a pipe, whose size is unknown until it has been read.
            with Path(text).expanduser().open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise OSError(EFBIG, f"it has more than {format_bytes(_MAX_FILE_BYTES)}")
            return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text"
            raise OptionError(
                f"the file {text!r} cannot be read: {reason}", "pass the path of a text file"
            ) from None


class JsonSchema(TextFile):
    """A JSON schema: a dict, JSON text or a Pydantic model. `check` returns it as JSON text."""

    def parse(self, text: str) -> Any:
        """Return the JSON text of a file. Raises OptionError if it cannot be read or is not a JSON object."""
        if text.lstrip().startswith("{"):
            raise OptionError(
                f"the schema must be given as the path of a file, not as JSON: {text[:40]!r}",
                "save the schema to a file, and pass its path",
            )
        schema = super().parse(text)
        try:
            is_object = isinstance(json.loads(schema), Mapping)
        except (ValueError, RecursionError) as error:
            place = ""
            if isinstance(error, json.JSONDecodeError):
                place = f" (line {error.lineno}, column {error.colno})"
            raise OptionError(f"{text} is not valid JSON{place}", "correct the file") from None
        if not is_object:
            raise OptionError(
                f"{text} contains {schema[:40]!r}, but a JSON schema must be a JSON object",
                "pass the path of a JSON schema",
            )
        return schema

    def check(self, name: str, value: Any) -> str:
        hint = "pass a dict, a JSON object as text, or a Pydantic model class"
        if isinstance(value, type):
            value = _pydantic_schema(name, value, hint)
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"{name} is not valid JSON: {error}", hint) from None
        if not isinstance(schema, Mapping):
            raise OptionError(f"{name} must be a JSON object, not {text[:40]}", hint)
        return json.dumps(read_schema(schema, name), ensure_ascii=False)


def _pydantic_schema(name: str, model: type, hint: str) -> Any:
    from pydantic import BaseModel
    from pydantic.errors import PydanticUserError

    if not issubclass(model, BaseModel):
        raise OptionError(f"{name} must be a JSON schema, not the class {model.__name__}", hint)
    try:
        # Pydantic ignores undeclared properties by default. OpenAI's library forbids them in its requests.
        return closed_objects(model.model_json_schema())
    except PydanticUserError as error:
        raise OptionError(f"{name}: {model.__name__} has no JSON schema: {error.message}", hint) from None


@dataclass(frozen=True)
class SamplingNumber(Kind):
    """A numeric sampling setting. `SamplingParams` checks its type and range."""

    metavar: str = "X"
    convert: Callable[[str], float] = float

    def parse(self, text: str) -> Any:
        return converted(text, self.convert)

    def check(self, name: str, value: Any) -> Any:
        settings: dict[str, Any] = {name: value}
        return getattr(SamplingParams(**settings), name)

    def json_schema(self, name: str) -> dict[str, Any]:
        limits = SETTING_RANGES.get(name)
        return {"minimum": limits.low, "maximum": limits.high} if limits else {}


class TokenBiases(SamplingNumber):
    """Numbers to add to the logits of individual tokens. Each string has the form `ID=VALUE`."""

    repeatable = True

    def parse(self, text: str) -> Any:
        token, _, bias = text.partition("=")
        return converted(text, lambda _: (int(token), float(bias)))

    def check(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            wrong = next((pair for pair in value if not isinstance(pair, tuple)), None)
            if wrong is not None:
                raise OptionError(
                    f"{name} must have the form ID=VALUE, not {wrong!r}", "for example, use 1523=-2.5"
                )
            value = dict(value)
        return super().check(name, value)
