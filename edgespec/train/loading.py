"""Load the target and the draft model to train, or explain which version of either model is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from edgespec.chat.template import ChatTemplate
from edgespec.errors import ModelFileError, OptionError, TemplateError
from edgespec.model.base import Progress
from edgespec.model.drafter_training import Student, Teacher, Writer
from edgespec.model.registry import format_at
from edgespec.model.trial_load import TrialModel, check_loadable
from edgespec.store.drafts import choose_draft
from edgespec.store.reference import Resolved, resolve
from edgespec.system.files import error_reason, sampled_sha256

__all__ = ["DraftToTrain", "TrainingTarget", "find_draft", "load_target"]


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """A target loaded for training a drafter.

    Attributes:
        name: The target's name, for messages.
        teacher: The loaded model.
        template: The target's chat template.
        path: Folder of the loaded model.
        identity: Hash of the loaded model's files.
        gguf: The GGUF model that will use the drafter, or None if the drafter is for the loaded model
            itself.
        writer: The model that writes the conversations, or None if the loaded model writes them.
    """

    name: str
    teacher: Teacher
    template: ChatTemplate
    path: Path
    identity: str
    gguf: Path | None
    writer: Path | None = None

    @property
    def writer_identity(self) -> str:
        """Hash of the files of `writer`, or an empty string. Raises ModelFileError on failure."""
        return _identity(self.writer) if self.writer else ""

    def open_writer(self, progress: Progress) -> AbstractContextManager[Writer]:
        """Load the model that writes the conversations, and close it at the end of the `with` block.

        A GGUF target writes its own text, because llama.cpp generates text much faster on CPUs than MLX. The
        drafter then also learns from text with this file's quantisation.

        Args:
            progress: Called with a description and the completed fraction. Returning False cancels loading.

        Raises:
            ModelFileError: The model is damaged or not supported.
            MemoryBudgetError: The model does not fit in memory next to `teacher`.
            CancelledError: `progress` returned False.
        """
        if self.writer is None:
            return nullcontext(self.teacher)
        form = format_at(self.writer)
        assert form.open_writer is not None
        check_loadable([TrialModel(self.name, self.writer, form, runs=True)], progress)
        return form.open_writer(str(self.writer), self.name, progress)


@dataclass(frozen=True, slots=True)
class DraftToTrain:
    """A draft model to train.

    Attributes:
        model: The draft model.
        lora: Whether to train a LoRA adapter instead of the weights.
    """

    model: Resolved
    lora: bool

    def student(self, target: TrainingTarget) -> Student:
        """Return the draft model as a student of the target.

        Raises:
            OptionError: The draft model and the target have different vocabularies.
        """
        path = self.model.path
        own, other = format_at(path).read_tokens(path), format_at(target.path).read_tokens(target.path)
        if own is not None and other is not None and not own.same_ids(other):
            raise OptionError(
                f"{self.model.name} cannot be trained for {target.name}: their vocabularies differ",
                "pass a draft model from the same family with --draft",
                code="vocabulary_mismatch",
            )
        return target.teacher.draft(path, self.model.name, self.lora)

    @property
    def identity(self) -> str:
        """Hash of the draft model's files. Raises ModelFileError if they cannot be read."""
        return _identity(self.model.path)


def find_draft(target: Resolved, reference: str, folder: Path, progress: Progress) -> Resolved:
    """Find the draft model to train, downloading it if the user named it.

    Args:
        target: The model to draft for.
        reference: Reference to the draft model. `auto` chooses the one that `edgespec chat` would use.
        folder: Folder for the trained draft model.
        progress: Called during a download. Returning False cancels it.

    Raises:
        OptionError: There is no draft model, it cannot be trained, or its folder is `folder`.
        EdgespecError: Any error raised by `resolve`.
    """
    if reference == "auto":
        choice = choose_draft(target)
        if choice.draft is None:
            raise OptionError(
                f"there is no draft model to train for {target.name}: {choice.reason}",
                "choose one with --draft MODEL",
                code="draft_missing",
            )
        draft = choice.draft
    else:
        draft = resolve(reference, progress=progress)
    if draft.file_format.load_teacher is None:
        raise OptionError(
            f"the draft model {draft.name} is a GGUF model, but only MLX and Hugging Face models can be"
            " trained",
            "pass its MLX or Hugging Face version with --draft",
            code="model_not_trainable",
        )
    if folder.resolve() == draft.path.resolve():
        raise OptionError(
            f"{folder} is the draft model's own folder",
            "choose another folder with --to",
            code="output_exists",
        )
    return draft


@contextmanager
def load_target(path: Path, name: str, weights: Path | None, progress: Progress) -> Iterator[TrainingTarget]:
    """Yield a target loaded for training.

    Args:
        path: File or folder of the target.
        name: The target's name, for messages.
        weights: Folder with the MLX or Hugging Face version of a GGUF target. It provides the hidden states,
            and the GGUF target writes the text.
        progress: Called with a description and the completed fraction. Returning False cancels loading.

    Raises:
        OptionError: `weights` is missing or not needed, or its vocabulary differs from the target's.
        TemplateError: The target has no chat template.
        ModelFileError: The model is damaged or not supported.
        CancelledError: `progress` returned False.
    """
    trained = _trainable(path, name, weights)
    load = format_at(trained).load_teacher
    assert load is not None
    teacher = load(str(trained), name, progress)
    vocabulary = teacher.vocabulary
    if vocabulary.chat_template is None:
        raise TemplateError(
            f"{name} has no chat template, so it cannot be used for chats",
            "choose another model",
            code="template_missing",
        )
    template = ChatTemplate(vocabulary.chat_template, vocabulary.bos_text, vocabulary.eos_text)
    try:
        gguf = None if trained == path else path
        writer = gguf if gguf and format_at(gguf).open_writer else None
        yield TrainingTarget(name, teacher, template, trained, _identity(trained), gguf, writer)
    finally:
        template.close()


def _trainable(path: Path, name: str, weights: Path | None) -> Path:
    """Return the folder of the model to train with. Raises OptionError if `weights` is missing or wrong."""
    if format_at(path).load_teacher is not None:
        if weights is not None:
            raise OptionError(
                f"--weights is only for GGUF models, but {name} is an MLX or Hugging Face model",
                "omit --weights",
                code="option_not_supported",
            )
        return path
    if weights is None:
        raise OptionError(
            f"{name} is a GGUF model, but training needs its MLX or Hugging Face version",
            "pass that version's folder with --weights DIR",
            code="model_not_trainable",
        )
    form = format_at(weights)
    if form.load_teacher is None:
        raise OptionError(
            f"--weights {weights} is not a folder with an MLX or Hugging Face model",
            "pass a folder with config.json and model.safetensors",
            code="wrong_file",
        )
    if difference := _difference(path, weights):
        raise OptionError(
            f"--weights {weights} is not the same model as {name}: {difference}",
            "pass the model that the GGUF file was made from",
            code="model_mismatch",
        )
    return weights


def _difference(path: Path, weights: Path) -> str:
    """Describe how another version of a GGUF model differs from it, or return an empty string."""
    own, other = format_at(path).read_info(path), format_at(weights).read_info(weights)
    # Unlike other formats, GGUF counts a model's multi-token prediction layers among its layers.
    if not own.heads and 0 < own.layers != other.layers > 0:
        return f"it has {other.layers:,} layers, not {own.layers:,}"
    if 0 < own.hidden_size != other.hidden_size > 0:
        return f"its hidden size is {other.hidden_size:,}, not {own.hidden_size:,}"
    own_tokens, other_tokens = format_at(path).read_tokens(path), format_at(weights).read_tokens(weights)
    if own_tokens is not None and other_tokens is not None and not own_tokens.same_ids(other_tokens):
        return "their vocabularies differ"
    return ""


def _identity(folder: Path) -> str:
    """Return a hash that identifies a model's files."""
    try:
        digests = [sampled_sha256(file) for file in format_at(folder).files(folder)]
    except OSError as error:
        raise ModelFileError(
            f"{folder} cannot be read: {error_reason(error)}",
            "check the folder's permissions",
            code="model_file_unreadable",
        ) from error
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()
