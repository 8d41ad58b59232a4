"""The error tree. Every error a person can meet is one line: what failed, the number, the next step."""

from __future__ import annotations

__all__ = [
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
    "OptionError",
    "OutOfMemoryError",
    "TemplateError",
    "VocabularyMismatchError",
]


class EdgespecError(Exception):
    """Base of every error edgespec raises on purpose.

    The message is one line: `what` failed (with its number), then the `next_step` a person can take.
    """

    def __init__(self, what: str, next_step: str = "") -> None:
        self.what = " ".join(what.split())
        self.next_step = " ".join(next_step.split())
        super().__init__(f"{self.what}; {self.next_step}" if self.next_step else self.what)


class OptionError(EdgespecError, ValueError):
    """An option is unknown or its value makes no sense (exit status 2)."""


class ConfigurationError(EdgespecError):
    """The file of settings, or an environment variable, says something that cannot be used."""


class ModelNotFoundError(EdgespecError):
    """A model reference points at nothing."""


class ModelFileError(EdgespecError):
    """A model file is missing, unreadable, damaged, or not a model."""


class DownloadError(EdgespecError):
    """A model could not be fetched."""


class BackendMissingError(EdgespecError):
    """The library that would run this model is not installed."""


class BackendError(EdgespecError):
    """The backend failed while loading or running a model."""


class CapabilityError(BackendError):
    """The model cannot do what was asked of it, such as rolling back its memory."""


class VocabularyMismatchError(EdgespecError):
    """Target and draft do not share their tokens."""


class MemoryBudgetError(EdgespecError):
    """The models and their caches do not fit the memory they were given."""


class OutOfMemoryError(MemoryBudgetError, BackendError):
    """A library found no memory for what it was doing; the model stays as it was before."""


class ContextFullError(EdgespecError):
    """The tokens do not fit the context."""


class TemplateError(EdgespecError):
    """The model's chat template is missing or cannot be rendered."""


class ChatFileError(EdgespecError):
    """A saved chat cannot be read or written."""


class ClosedError(EdgespecError):
    """The object was used after it was closed."""


class BusyError(EdgespecError):
    """Another reply is still being produced on this runtime."""


class CancelledError(EdgespecError):
    """The caller asked for the work to stop."""
