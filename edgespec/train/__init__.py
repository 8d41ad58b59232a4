"""Train heads and draft models for a given target (`edgespec train`)."""

from __future__ import annotations

from edgespec.train.conversations import TrainingPrompt, chat_prompts, file_prompts
from edgespec.train.evaluation import DrafterFigures
from edgespec.train.loading import DraftToTrain, TrainingTarget, find_draft, load_target
from edgespec.train.run import TrainingResult, train_drafter
from edgespec.train.state import CurvePoint, TrainingSettings
from edgespec.train.timing import TrainingEstimate

__all__ = [
    "CurvePoint",
    "DraftToTrain",
    "DrafterFigures",
    "TrainingEstimate",
    "TrainingPrompt",
    "TrainingResult",
    "TrainingSettings",
    "TrainingTarget",
    "chat_prompts",
    "file_prompts",
    "find_draft",
    "load_target",
    "train_drafter",
]
