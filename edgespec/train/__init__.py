"""Train heads for the user's own models (`edgespec train`)."""

from __future__ import annotations

from edgespec.train.evaluation import HeadFigures
from edgespec.train.loading import TrainingTarget, load_target
from edgespec.train.run import TrainingResult, train_head
from edgespec.train.sources import TrainingPrompt, chat_prompts, file_prompts
from edgespec.train.state import CurvePoint, TrainingSettings

__all__ = [
    "CurvePoint",
    "HeadFigures",
    "TrainingPrompt",
    "TrainingResult",
    "TrainingSettings",
    "TrainingTarget",
    "chat_prompts",
    "file_prompts",
    "load_target",
    "train_head",
]
