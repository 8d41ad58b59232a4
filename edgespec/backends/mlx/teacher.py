"""Load a target for training, and create trainers for its heads and draft models."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends.mlx.draft_trainer import DraftStudent
from edgespec.backends.mlx.head_trainer import HeadStudent, TrainableHead
from edgespec.backends.mlx.model_skeleton import translate_load_errors
from edgespec.backends.mlx.teacher_model import TeacherModel, convert_to_float32, faster_in_float32
from edgespec.backends.mlx.trainable_heads import TrainableEagle, TrainableHydra, TrainableMedusa
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from edgespec.backends.mlx.weight_loading import load_model
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.drafter_training import Student

__all__ = ["MlxTeacher", "load_teacher"]

_HEADS: dict[str, type[TrainableHead]] = {
    kind.name: kind for kind in (TrainableEagle, TrainableMedusa, TrainableHydra)
}


def load_teacher(path: str, name: str, progress: Progress | None = None) -> MlxTeacher:
    """Load the MLX or Hugging Face model in a folder to train heads for it.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        MemoryBudgetError: The model does not fit in memory.
        CapabilityError: Heads cannot be trained for this model.
        CancelledError: `progress` returned False.
    """
    loaded = load_model(path, name, LoadOptions(), progress)
    with translate_load_errors(path):
        vocabulary = MlxVocabulary(loaded.tokenizer, loaded.skeleton.vocab_size)
        if faster_in_float32(loaded):
            convert_to_float32(loaded.skeleton.model)
    return MlxTeacher(loaded, name, vocabulary)


class MlxTeacher(TeacherModel):
    """Implements `Teacher` for MLX models."""

    def head(self, method: str) -> Student:
        return HeadStudent(self, _HEADS[method])

    def draft(self, path: Path, name: str, lora: bool) -> Student:
        return DraftStudent(self, path, name, lora)
