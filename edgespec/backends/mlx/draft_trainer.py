"""Distil a draft model from its target, partly on text that the draft model itself generates.

Based on on-policy distillation (GKD, arXiv 2306.13649) and DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten, tree_unflatten
from numpy.typing import NDArray

from edgespec.backends.mlx.evaluation import evaluate, translate_errors
from edgespec.backends.mlx.gradient_descent import Arrays, GradientDescent, ParameterGroup, save_arrays
from edgespec.backends.mlx.lora_trainer import adapted_layers
from edgespec.backends.mlx.model_skeleton import named_arrays, read_skeleton, translate_load_errors
from edgespec.backends.mlx.teacher_model import (
    TeacherModel,
    convert_to_float32,
    faster_in_float32,
    token_ranks,
    write_texts,
)
from edgespec.backends.mlx.weight_loading import load_model
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.base import LoadOptions
from edgespec.model.drafter_training import TrainingBatch
from edgespec.model.formats.mlx_files import WEIGHTS_INDEX, is_weights

__all__ = ["DraftStudent", "DraftTrainer"]

_WEIGHTS_FILE = "model.safetensors"
# Suffixes of the configuration and tokenizer files, which are copied to the trained draft model's folder.
_COPIED_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})
# Learning rate for training all weights, multiplied by the hidden size. Wider networks need lower rates
# (arXiv 2203.03466). On the demo models, a rate five times as high made the draft model worse.
_RATE_TIMES_SIZE = 0.01
# Learning rate for LoRA weights, the same as in online training.
_LORA_RATE = 3e-4
_MAX_GRADIENT_NORM = 1.0
# Every second training step is on-policy: it uses text that the draft model itself generated. This
# corresponds to lambda = 0.5 in GKD.
_ON_POLICY_EVERY = 2
# Maximum number of tokens that the draft model generates per reply in an on-policy step. Real drafts are
# shorter, and generating more tokens would take too long.
_OWN_TOKENS = 32


class TrainableDraft:
    """A draft model with trainable weights. It is published with the original model's quantisation.

    With `lora`, LoRA weights are trained instead of the model's own weights.

    Attributes:
        net: The mlx `nn.Module`.
        vocab_size: Number of logits per token.
        size: Number of values in a hidden state.

    Raises:
        ModelFileError: The model is damaged or not supported.
        MemoryBudgetError: The model does not fit in memory.
        CapabilityError: The model has no layers to which LoRA layers can be added.
    """

    def __init__(self, path: Path, name: str, lora: bool) -> None:
        # Read the data types from the files, because loading may convert the weights to other types.
        stored = read_skeleton(str(path), name, LoadOptions()).model.parameters()
        self._dtypes = {key: array.dtype for key, array in named_arrays(stored)}
        loaded = load_model(str(path), name, LoadOptions(), None)
        self.net: Any = loaded.skeleton.model
        self.vocab_size = loaded.skeleton.vocab_size
        config = loaded.skeleton.config
        self.size = int((config.get("text_config") or config)["hidden_size"])
        # Arguments of `mx.quantize` for each quantised module.
        self._quantised = {
            key: {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
            for key, module in self.net.named_modules()
            if "scales" in module
        }
        self._adapted = []
        with translate_load_errors(str(path)):
            if not lora or faster_in_float32(loaded):
                convert_to_float32(self.net)
        if lora:
            self._adapted = list(adapted_layers(self.net))
            if not self._adapted:
                raise CapabilityError(
                    f"LoRA layers cannot be added to {name}, because it has no linear layers",
                    "omit --lora",
                    code="model_not_trainable",
                )
            self.net.freeze()
            for layer in self._adapted:
                layer.parent[layer.attribute] = layer.adapted
                layer.adapted.unfreeze(recurse=False)

    @property
    def weights(self) -> Arrays:
        """The trained weights, keyed by name."""
        leaves: Any = tree_flatten(self.net.trainable_parameters())
        return dict(leaves)

    @weights.setter
    def weights(self, weights: Arrays) -> None:
        self.net.update(tree_unflatten(list(weights.items())))

    def published(self) -> Arrays:
        """Return the tensors to publish, in the original model's data types."""
        arrays: Arrays = {}
        for key, array in self._merged().items():
            module, _, leaf = key.rpartition(".")
            if leaf == "weight" and module in self._quantised and mx.issubdtype(array.dtype, mx.floating):
                scales_dtype = self._dtypes[f"{module}.scales"]
                # Keep the weights' type if the scales are 8-bit integers, as in some quantisation formats.
                weight = array.astype(scales_dtype) if mx.issubdtype(scales_dtype, mx.floating) else array
                packed = mx.quantize(weight, **self._quantised[module])
                parts = zip(("weight", "scales", "biases"), packed, strict=False)
                arrays.update({f"{module}.{part}": values for part, values in parts})
            else:
                arrays[key] = array.astype(self._dtypes[key])
        return arrays

    def _merged(self) -> Arrays:
        """Return the model's parameters with the LoRA weights merged in."""
        try:
            for layer in self._adapted:
                layer.parent[layer.attribute] = layer.adapted.fuse()
            return dict(named_arrays(self.net.parameters()))
        finally:
            for layer in self._adapted:
                layer.parent[layer.attribute] = layer.adapted


class DraftGuesser:
    """Implements `Guesser` for a draft model that should imitate `teacher`."""

    def __init__(self, teacher: TeacherModel, draft: TrainableDraft, name: str) -> None:
        self._teacher, self._draft, self._name = teacher, draft, name
        # The vocabularies may end with different numbers of padding tokens.
        self._vocab_size = min(teacher.vocabulary.size, draft.vocab_size)
        self.draft_tokens = np.arange(self._vocab_size)

    def ranks(self, batch: TrainingBatch, depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        best = self._target_logits(batch).argmax(axis=-1)
        evaluate(best)
        ranks, rows = token_ranks(self._draft_logits(batch), np.array(best)), batch.drafting_rows(depth)
        drafted = np.stack([ranks[rows + 1 + step] for step in range(depth)], axis=1)
        return drafted, rows // batch.tokens.shape[1]

    def _target_logits(self, batch: TrainingBatch) -> mx.array:
        """Return the target's logits after each token, float32 [flattened tokens, vocabulary]."""
        logits = self._teacher.logits(batch.tokens)
        return logits.reshape(-1, logits.shape[-1])[:, : self._vocab_size]

    def _draft_logits(self, batch: TrainingBatch) -> mx.array:
        """Return the draft model's logits after each token, float32 [flattened tokens, vocabulary]."""
        with translate_errors(f"{self._name} could not be run"):
            logits = self._draft.net(mx.array(self._known(batch.tokens)))
            return logits.reshape(-1, logits.shape[-1])[:, : self._vocab_size].astype(mx.float32)

    def _known(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Replace padding tokens that only one model has, because MLX does not bounds-check token ids."""
        return np.minimum(tokens, self._vocab_size - 1)


class DraftTrainer(DraftGuesser):
    """Implements `DrafterTrainer` for a draft model that was loaded from the folder `original`."""

    def __init__(
        self, teacher: TeacherModel, draft: TrainableDraft, name: str, original: Path, rate: float
    ) -> None:
        super().__init__(teacher, draft, name)
        self._original = original
        adam = optimizers.Adam(0.0, betas=[0.9, 0.95])
        everything = ParameterGroup(adam, rate, lambda _weight: True)
        self._descent = GradientDescent(draft, (everything,), _MAX_GRADIENT_NORM, name)

    def step(self, batch: TrainingBatch, done: float) -> float:
        with translate_errors(f"{self._name} cannot be trained"):
            if self._descent.steps % _ON_POLICY_EVERY == 0:
                batch = self.continued(batch)
            rows = mx.array(np.flatnonzero(batch.replied_after(1)))
            target_logits = self._target_logits(batch)[rows]
            evaluate(target_logits)
            return self._descent.step(
                lambda: _total_variation(target_logits, self._draft_logits(batch)[rows]), done
            )

    def continued(self, batch: TrainingBatch) -> TrainingBatch:
        """Truncate each reply at a random token, and let the draft model continue it at temperature 1."""
        random = np.random.default_rng(self._descent.steps)
        tokens, replied = self._known(batch.tokens), batch.replied.copy()
        rows = np.flatnonzero(replied.any(axis=1))
        replies = [np.flatnonzero(replied[row]) for row in rows]
        starts = [max(1, int(random.choice(reply))) for reply in replies]
        texts = write_texts(
            self._draft.net,
            self._teacher.vocabulary,
            [tokens[row, :start].tolist() for row, start in zip(rows, starts, strict=True)],
            [1.0] * len(rows),
            [min(_OWN_TOKENS, tokens.shape[1] - start) for start in starts],
            self._descent.steps,
            lambda _description, _fraction: True,
            failure=f"{self._name} could not generate text",
        )
        for row, start, text in zip(rows, starts, texts, strict=True):
            end = start + len(text)
            tokens[row, start:end], tokens[row, end:] = text, 0
            replied[row, start:end], replied[row, end:] = True, False
        return TrainingBatch(self._known(tokens), replied)

    def save_state(self, path: Path) -> None:
        self._descent.save(path)

    def load_state(self, path: Path) -> None:
        self._descent.load(path)

    def publish(self, folder: Path) -> None:
        for file in self._original.iterdir():
            if file.suffix in _COPIED_SUFFIXES and file.name != WEIGHTS_INDEX:
                shutil.copyfile(file, folder / file.name)
        save_arrays(folder / _WEIGHTS_FILE, self._draft.published(), {"format": "mlx"})


class DraftStudent:
    """Implements `Student` for a draft model. See `Teacher.draft`."""

    def __init__(self, teacher: TeacherModel, path: Path, name: str, lora: bool) -> None:
        self.title = "draft model"
        self._teacher, self._path, self._name, self._lora = teacher, path, name, lora

    def trainer(self, _examples: TrainingBatch, _counts: NDArray[np.int64]) -> DraftTrainer:
        draft = TrainableDraft(self._path, self._name, self._lora)
        rate = _LORA_RATE if self._lora else _RATE_TIMES_SIZE / draft.size
        return DraftTrainer(self._teacher, draft, self._name, self._path, rate)

    def published(self, folder: Path) -> DraftGuesser | None:
        names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
        weights = set(filter(is_weights, names))
        if not weights and "config.json" not in names:
            return None
        if weights != {_WEIGHTS_FILE} or _config(folder) != _config(self._path):
            raise ModelFileError(
                f"{folder} already contains a model that is not a trained version of {self._name}",
                "choose another folder for the new draft model",
                code="output_exists",
            )
        return self._loaded(folder)

    def untrained(self) -> DraftGuesser:
        return self._loaded(self._path)

    def _loaded(self, folder: Path) -> DraftGuesser:
        return DraftGuesser(self._teacher, TrainableDraft(folder, self._name, lora=False), self._name)


def _config(folder: Path) -> bytes:
    """Return the contents of a model's configuration file, or empty bytes if the file does not exist."""
    file = folder / "config.json"
    return file.read_bytes() if file.exists() else b""


def _total_variation(target_logits: mx.array, draft_logits: mx.array) -> mx.array:
    """Return the mean total variation (TV) distance between the draft model and the target.

    Rejection sampling accepts a drafted token with a probability of 1 - TV. On the demo models, this loss
    raised 1 - TV on held-out text more than the Jensen-Shannon divergence did. KL divergence lowered it,
    because it is dominated by tokens that a small model cannot learn. TV gives almost no gradient for tokens
    to which the draft model assigns almost no probability, but such tokens are rare.
    """
    difference = mx.softmax(target_logits, axis=-1) - mx.softmax(draft_logits, axis=-1)
    return 0.5 * mx.abs(difference).sum(axis=-1).mean()
