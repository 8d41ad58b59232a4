"""The exceptions that edgespec raises. Each message says what failed and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "AttachmentError",
    "BackendError",
    "BackendMissingError",
    "BusyError",
    "CancelledError",
    "CapabilityError",
    "ChatFileError",
    "ClosedError",
    "ConfigurationError",
    "ContextFullError",
    "DownloadError",
    "EdgespecError",
    "MemoryBudgetError",
    "ModelFileError",
    "ModelNotFoundError",
    "NotDownloadedError",
    "OptionError",
    "OutOfMemoryError",
    "TemplateError",
    "VocabularyMismatchError",
    "WorkerError",
    "WorkerLostError",
    "about_option",
    "shorten",
]


def shorten(text: object, max_characters: int = 120) -> str:
    """Truncate a value's text to `max_characters`, for messages that quote long values."""
    shown = str(text)
    return shown if len(shown) <= max_characters else f"{shown[:max_characters]}..."


class EdgespecError(Exception):
    """Base class of all edgespec exceptions. Catch it to handle every expected failure.

    Attributes:
        what: What failed, including the value that caused it.
        next_step: What the user can do about it. May be empty.
        option: Name of the option whose value caused the error. Empty if that is unknown.
    """

    def __init__(self, what: str, next_step: str = "", *, option: str = "") -> None:
        self.option = option
        self.what = " ".join(what.split())
        self.next_step = " ".join(next_step.split())
        super().__init__(f"{self.what}; {self.next_step}" if self.next_step else self.what)


@contextmanager
def about_option(name: str) -> Iterator[None]:
    """Set `option` on errors raised in the `with` block, unless they already name an option."""
    try:
        yield
    except EdgespecError as error:
        error.option = error.option or name
        raise


class OptionError(EdgespecError, ValueError):
    """Raised for an unknown option or an invalid value. Correct the option. The CLI exits with status 2."""


class ConfigurationError(EdgespecError):
    """Raised when the settings file or an environment variable is invalid. Correct or delete the entry."""


class ModelNotFoundError(EdgespecError):
    """Raised when a model reference matches no model. `edgespec models` lists the installed models."""


class NotDownloadedError(ModelNotFoundError):
    """Raised when a model is not on this machine. `edgespec.download_model` downloads it."""


class ModelFileError(EdgespecError):
    """Raised when a model file is missing, damaged or unsupported. Download or replace the file."""


class DownloadError(EdgespecError):
    """Raised when a model cannot be downloaded. Check the network and disk space, then try again."""


class BackendMissingError(EdgespecError):
    """Raised when the library that runs this model is not installed. The message names the package."""


class BackendError(EdgespecError):
    """Raised when the backend fails while loading or running a model. Close the model and load it again."""


class WorkerError(EdgespecError):
    """Raised when a worker in `--workers` cannot be used. Check that it runs `edgespec worker`."""


class WorkerLostError(BackendError):
    """Raised when a worker exits or stops responding. Restart the worker, then load the model again."""


class CapabilityError(BackendError):
    """Raised when a model does not support an operation, such as rollback. Choose another method or model."""


class VocabularyMismatchError(EdgespecError):
    """Raised when the draft model's vocabulary does not match the target's. Choose another draft model."""


class MemoryBudgetError(EdgespecError):
    """Raised when models and caches exceed the memory budget. Reduce the context or raise the budget."""


class OutOfMemoryError(MemoryBudgetError, BackendError):
    """Raised when an allocation fails while a model runs. The model keeps its state and remains usable."""


class ContextFullError(EdgespecError):
    """Raised when tokens do not fit in the context. Use a larger context or a shorter prompt.

    Attributes:
        prompt_tokens: Number of tokens in the prompt, or a lower bound if the exact number is unknown. None
            if the error is not about a prompt.
        context_tokens: Number of tokens that the context holds. None if the error is not about a prompt.
    """

    def __init__(
        self,
        what: str,
        next_step: str = "",
        *,
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(what, next_step)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class TemplateError(EdgespecError):
    """Raised when a model has no usable chat template. Choose another model, or use raw prompts."""


class AttachmentError(EdgespecError):
    """Raised when a file cannot be attached to a message. Choose another file, or copy its text."""


class ChatFileError(EdgespecError):
    """Raised when a saved chat cannot be read or written. Check the file's permissions and the disk space."""


class ClosedError(EdgespecError):
    """Raised when an object is used after `close`. Load the model again."""


class BusyError(EdgespecError):
    """Raised when a runtime is still generating another reply. Wait for that reply or cancel it."""


class CancelledError(EdgespecError):
    """Raised when the caller cancels an operation, through `interrupt` or a progress callback."""
