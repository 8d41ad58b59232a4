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
    """Truncate `text` to `max_characters`, for messages that quote long values."""
    shown = str(text)
    return shown if len(shown) <= max_characters else f"{shown[:max_characters]}..."


class EdgespecError(Exception):
    """Base class of all edgespec exceptions. Catch it to handle every expected failure.

    Attributes:
        what: What failed, including the value that caused it.
        next_step: What the user can do about it. May be empty.
        code: Stable identifier of the cause, such as `model_not_found`, that programs can branch on. Each
            class has a default. `docs/errors.md` lists all codes.
        option: Name of the option whose value caused the error. Empty if unknown.
    """

    code = "failed"

    def __init__(self, what: str, next_step: str = "", *, code: str = "", option: str = "") -> None:
        self.code = code or self.code
        self.option = option
        self.what = " ".join(what.split())
        self.next_step = " ".join(next_step.split())
        super().__init__(f"{self.what}; {self.next_step}" if self.next_step else self.what)

    def __reduce__(self) -> tuple[object, ...]:
        """Make the error picklable without calling `__init__`, whose arguments differ between subclasses."""
        return _restored, (type(self), self.args), self.__dict__

    def __repr__(self) -> str:
        """Return the class, message and code."""
        return f"{type(self).__name__}({str(self)!r}, code={self.code!r})"


def _restored(kind: type[EdgespecError], args: tuple[object, ...]) -> EdgespecError:
    return kind.__new__(kind, *args)


@contextmanager
def about_option(name: str, kind: type[EdgespecError] = EdgespecError) -> Iterator[None]:
    """Set `option` on errors of this kind raised in the `with` block, unless they already name an option."""
    try:
        yield
    except kind as error:
        error.option = error.option or name
        raise


class OptionError(EdgespecError, ValueError):
    """Raised for an unknown option or an invalid value. Correct the option. The CLI exits with status 2."""

    code = "option_invalid"


class ConfigurationError(EdgespecError):
    """Raised when the settings file or an environment variable is invalid. Correct or delete the entry."""

    code = "configuration_invalid"


class ModelNotFoundError(EdgespecError):
    """Raised when a model reference matches no model. `edgespec models` lists the installed models."""

    code = "model_not_found"


class NotDownloadedError(ModelNotFoundError):
    """Raised when a model is not on this machine. `edgespec.download_model` downloads it."""

    code = "model_not_downloaded"


class ModelFileError(EdgespecError):
    """Raised when a model file is missing, damaged or unsupported. Download or replace the file."""

    code = "model_file_damaged"


class DownloadError(EdgespecError):
    """Raised when a model cannot be downloaded. Check the network and disk space, then try again."""

    code = "download_failed"


class BackendMissingError(EdgespecError):
    """Raised when the library that runs this model is not installed. The message names the package."""

    code = "backend_missing"


class BackendError(EdgespecError):
    """Raised when the backend fails while loading or running a model. Close the model and load it again."""

    code = "backend_failed"


class WorkerError(EdgespecError):
    """Raised when a worker in `--workers` cannot be used. Check that it runs `edgespec worker`."""

    code = "worker_unavailable"


class WorkerLostError(BackendError):
    """Raised when a worker exits or stops responding. Restart the worker, then load the model again."""

    code = "worker_lost"


class CapabilityError(BackendError):
    """Raised when a model does not support an operation, such as rollback. Choose another method or model."""

    code = "not_supported"


class VocabularyMismatchError(EdgespecError):
    """Raised when the draft model's vocabulary does not match the target's. Choose another draft model."""

    code = "vocabulary_mismatch"


class MemoryBudgetError(EdgespecError):
    """Raised when models and caches exceed the memory budget. Reduce the context or raise the budget."""

    code = "model_does_not_fit"


class OutOfMemoryError(MemoryBudgetError, BackendError):
    """Raised when an allocation fails while a model runs. The model keeps its state and remains usable."""

    code = "out_of_memory"


class ContextFullError(EdgespecError):
    """Raised when tokens do not fit in the context. Use a larger context or a shorter prompt.

    Attributes:
        prompt_tokens: Number of tokens in the prompt, or a lower bound if the exact number is unknown. None
            if the error is not about a prompt.
        context_tokens: Number of tokens that the context holds. None if the error is not about a prompt.
        wanted_tokens: A context size that would hold the prompt and a reply, which `next_step` suggests. None
            if it suggests none.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        what: str,
        next_step: str = "",
        *,
        code: str = "",
        prompt_tokens: int | None = None,
        context_tokens: int | None = None,
        wanted_tokens: int | None = None,
    ) -> None:
        super().__init__(what, next_step, code=code)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.wanted_tokens = wanted_tokens


class TemplateError(EdgespecError):
    """Raised when a model has no usable chat template. Choose another model, or use raw prompts.

    Attributes:
        reason: The template's own error message, or why it cannot be rendered. Empty if unknown.
    """

    code = "template_invalid"

    def __init__(self, what: str, next_step: str = "", *, code: str = "", reason: str = "") -> None:
        super().__init__(what, next_step, code=code)
        self.reason = reason


class AttachmentError(EdgespecError):
    """Raised when a file cannot be attached to a message. Choose another file, or copy its text."""

    code = "attachment_invalid"


class ChatFileError(EdgespecError):
    """Raised when a saved chat cannot be read or written. Check the file's permissions and the disk space."""

    code = "chat_file_damaged"


class ClosedError(EdgespecError):
    """Raised when an object is used after `close`. Load the model again."""

    code = "closed"


class BusyError(EdgespecError):
    """Raised when a runtime is still generating another reply. Wait for that reply or cancel it."""

    code = "busy"


class CancelledError(EdgespecError):
    """Raised when the caller cancels an operation, through `interrupt` or a progress callback."""

    code = "cancelled"
