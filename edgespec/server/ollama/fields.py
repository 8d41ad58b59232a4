"""Request fields shared by Ollama's endpoints."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from edgespec.chat.message import PlacedImage
from edgespec.server.fields import Ignored, Off, One, ReplyFields, reply_options
from edgespec.server.leniency.constraints import ConstraintFields, answer_constraint, constraints_in
from edgespec.server.leniency.content import read_image
from edgespec.server.openai.logprobs import LogprobFields

__all__ = ["RENAMED", "OllamaFields", "OllamaOptions", "ignored_fields", "options_of", "read_images"]

RENAMED = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_window",
}
"""Maps Ollama's option names to edgespec's where they differ."""

# Ollama parses durations as Go does, such as `1h30m`. Clients also send numbers of seconds as text.
_DURATION = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|us|[µμ]s|ms|s|m|h))+)")


def _duration(value: float | str | None) -> float | str | None:
    """Validate `keep_alive`. An empty string means that it is not set. Raises ValueError."""
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, str) and text and not _DURATION.fullmatch(text):
        raise ValueError("must be a number of seconds or a time such as 5m; 0 unloads the model")
    return None if text == "" else text


class OllamaOptions(ReplyFields, ConstraintFields):
    """The field `options`, which accepts Ollama's and edgespec's option names.

    Some options are ignored. Most of them control how a model is loaded, which `edgespec serve` has already
    decided. Ignoring `num_ctx` is safe, because a prompt that exceeds the model's context is an error. The
    others control features that edgespec does not have, and are ignored only if they turn the feature off.
    """

    num_predict: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Like max_tokens. -1 and -2 mean the default."
    )
    repeat_penalty: float | None = Field(default=None, description="Like repetition_penalty.")
    repeat_last_n: int | None = Field(default=None, description="Like penalty_window.")
    embedding_only: Off
    # LangExtract also puts `keep_alive` into `options`, where it has no effect.
    keep_alive: Ignored
    f16_kv: Ignored
    logits_all: Off
    low_vram: Ignored
    main_gpu: Ignored
    mirostat: Off
    mirostat_eta: Ignored
    mirostat_tau: Ignored
    num_batch: Ignored
    num_ctx: Ignored
    num_gpu: Ignored
    num_keep: Ignored
    num_thread: Ignored
    numa: Ignored
    penalize_newline: One
    tfs_z: One
    use_mlock: Ignored
    use_mmap: Ignored
    vocab_only: Off


class OllamaFields(LogprobFields, ReplyFields, ConstraintFields):
    """Fields shared by chat and generate requests.

    Reply options belong in `options`. Ollama ignores them elsewhere, but some clients, such as an AI SDK
    provider, set them at the top level, so they are accepted there too.
    """

    model: str | None = Field(default=None, description="The model. Defaults to the server's own model.")
    stream: bool | None = Field(default=None, description="false returns the whole reply at once.")
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        default=None, description="Whether the model should reason. Any level counts as true."
    )
    max_output_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Like num_predict."
    )
    keep_alive: Annotated[float | str | None, AfterValidator(_duration)] = Field(
        default=None, description="0 unloads the model after the request. Other values are ignored."
    )
    num_ctx: Ignored
    shift: Ignored
    truncate: Ignored

    @property
    def unloads(self) -> bool:
        """Whether to unload the model after the request."""
        # A duration is zero if all of its numbers are, as in `0h0m`.
        return self.keep_alive == 0 or (
            isinstance(self.keep_alive, str) and not re.search("[1-9]", self.keep_alive)
        )

    @classmethod
    def known_fields(cls) -> list[str]:
        """Return the names of all fields, including those in `options`."""
        return [*super().known_fields(), *(f"options.{name}" for name in OllamaOptions.known_fields())]


def ignored_fields(fields: OllamaFields) -> list[str]:
    """Return the names of the ignored fields that the request sets, including `keep_alive`."""
    kept = [] if fields.keep_alive is None or fields.unloads else ["keep_alive"]
    return [*kept, *fields.ignored_fields()]


def options_of(fields: OllamaFields) -> dict[str, Any]:
    """Return the reply options that a request sets, keyed by their edgespec names."""
    options = reply_options(fields)
    constraints = constraints_in(fields, options)
    options.pop("logprobs", None)  # The field of this name is Ollama's.
    if fields.max_output_tokens is not None:
        options["max_tokens"] = fields.max_output_tokens
    if fields.options:
        inner = reply_options(fields.options)
        constraints |= constraints_in(fields.options, inner, "options.")
        options |= inner
    for theirs, ours in RENAMED.items():
        if (value := getattr(fields.options, theirs, None)) is not None:
            options[ours] = value
    if fields.think is not None:
        options["thinking"] = "on" if fields.think else "off"
    options |= answer_constraint(constraints)
    if fields.wanted_logprobs is not None:
        options["logprobs"] = fields.wanted_logprobs
    return options


def read_images(images: list[str] | None, place: str) -> list[PlacedImage]:
    """Decode a message's images, which precede its text. Raises ApiError if an image cannot be read."""
    return [PlacedImage(read_image(f"{place}.{at}", data)) for at, data in enumerate(images or ())]
