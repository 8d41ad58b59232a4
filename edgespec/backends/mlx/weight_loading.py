"""Load the weights and the tokenizer of an MLX model."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.memory_check import check_weights_fit
from edgespec.backends.mlx.build_info import mlx_core, mlx_lm_utils
from edgespec.backends.mlx.model_folder import check_tokenizer, read_json
from edgespec.backends.mlx.model_skeleton import named_arrays, read_skeleton, translate_load_errors
from edgespec.errors import CancelledError

if TYPE_CHECKING:
    from edgespec.backends.mlx.low_bit_weights import LowBitWeights

__all__ = ["LoadedModel", "load_model"]

# Size of the weights, in bytes, that are loaded between two progress reports. This takes a few milliseconds.
_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with all its weights in memory.

    Attributes:
        model: An mlx `nn.Module`.
        tokenizer: mlx_lm's TokenizerWrapper.
        config: The contents of config.json.
        architecture: Name of the architecture.
        parameters: Number of parameters.
        file_bytes: Size of the weight files in bytes.
        weight_bytes: Memory used by the weights, in bytes.
        low_bits_bytes: Additional memory used by low-bit weights, in bytes.
        quantisation: Quantisation or data type of most weights.
        widened: Whether 16-bit weights were widened to float32.
        trained_context_tokens: Context length that the model was trained for; 0 if unknown.
        vocab_size: Number of logits per token.
        kv_elements_per_token: Number of array elements in the KV caches per token.
        dtype: Data type of the computation (`mx.Dtype`).
        low_bits: Weights that can be read with fewer bits, or None if they were not requested.
    """

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    architecture: str
    parameters: int
    file_bytes: int
    weight_bytes: int
    low_bits_bytes: int
    quantisation: str
    widened: bool
    trained_context_tokens: int
    vocab_size: int
    kv_elements_per_token: int
    dtype: Any
    low_bits: LowBitWeights | None

    @property
    def description(self) -> str:
        """Description of the architecture, size and quantisation in one line."""
        text = f"{self.architecture} {self.parameters / 1e6:,.1f}M {self.quantisation}"
        return f"{text}, computed in float32" if self.widened else text


def load_model(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LoadedModel:
    """Load the weights and the tokenizer of the model in a folder.

    Args:
        path: Path of the model folder.
        name: Model name for error messages.
        options: Load options.
        progress: Callback for the loading progress. It can return False to cancel loading.

    Raises:
        ModelFileError: The folder does not contain a model, the model is damaged or unsupported, or the
            adapter belongs to another model.
        MemoryBudgetError: The weights exceed the memory limit.
        BackendMissingError: mlx or mlx-lm is not installed.
        CancelledError: `progress` returned False.
    """
    _report(progress, name, 0.0)
    skeleton = read_skeleton(path, name, options)
    model, config = skeleton.model, skeleton.config
    with translate_load_errors(path), contextlib.redirect_stdout(sys.stderr):
        check_tokenizer(Path(path))
        tokenizer = _load_tokenizer(Path(path), config)
    with translate_load_errors(path):
        low_bits = skeleton.low_bits
        check_weights_fit(name, skeleton.tensor_bytes, options)
        widened = _evaluate_weights(
            model, skeleton.sizes.widens(options), lambda fraction: _report(progress, name, fraction)
        )
        held_bytes = sum(weight.nbytes for _, weight in named_arrays(model.parameters()))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        architecture=config["model_type"],
        parameters=skeleton.parameters,
        file_bytes=skeleton.weights.file_bytes,
        weight_bytes=held_bytes - (low_bits.array_bytes if low_bits else 0),
        low_bits_bytes=low_bits.nbytes if low_bits else 0,
        quantisation=skeleton.quantisation,
        widened=widened,
        trained_context_tokens=skeleton.trained_context_tokens,
        vocab_size=skeleton.vocab_size,
        kv_elements_per_token=skeleton.kv_elements_per_token,
        dtype=_compute_dtype(model),
        low_bits=low_bits,
    )


def _report(progress: Progress | None, name: str, fraction: float) -> None:
    if progress is not None and not progress(f"loading {name}", fraction):
        raise CancelledError(f"loading {name} was cancelled")


def _load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """Load the tokenizer, with the end-of-sequence tokens from all configuration files of the model."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    eos_ids: set[int] = set()
    sources = [config, config.get("text_config")]
    if (folder / "generation_config.json").exists():
        sources.append(read_json(folder, "generation_config.json"))
    for source in sources:
        eos = source.get("eos_token_id") if isinstance(source, dict) else None
        eos_ids.update(token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int))
    offline = {"local_files_only": True, "trust_remote_code": False}
    return mlx_lm_utils().load_tokenizer(folder, offline, eos_token_ids=sorted(eos_ids))


def _evaluate_weights(model: Any, widen: bool, report: Callable[[float], None]) -> bool:
    """Load all weights into memory, a few megabytes at a time.

    All weights must be evaluated here, because MLX can evaluate an array only in the thread that created it,
    and the model may run in another thread.

    Returns:
        Whether 16-bit weights were widened to float32.
    """
    from mlx.utils import tree_unflatten

    mx = mlx_core()
    # Remove each weight from the list, so that its 16-bit array is freed before the next one is widened. Load
    # the largest weights first, while there is enough memory for both versions of a weight.
    waiting = sorted(named_arrays(model.parameters()), key=lambda each: each[1].nbytes)
    total = max(1, sum(weight.nbytes for _, weight in waiting))
    done, widened = 0, False
    while waiting:
        piece: list[tuple[str, Any]] = []
        size = 0
        while waiting and (not piece or size + waiting[-1][1].nbytes <= _PIECE_BYTES):
            name, weight = waiting.pop()
            size += weight.nbytes
            if widen and weight.dtype in (mx.float16, mx.bfloat16):
                weight, widened = weight.astype(mx.float32), True
            piece.append((name, weight))
        mx.eval([weight for _, weight in piece])
        model.update(tree_unflatten(piece))
        done += size
        report(done / total)
    # Also evaluate arrays that are not parameters, such as the frequencies of rotary embeddings.
    mx.eval([array for _, array in named_arrays(model)])
    return widened


def _compute_dtype(model: Any) -> Any:
    """Return the most common floating-point data type of the weights, or of the scales if quantised."""
    mx = mlx_core()
    floating: Counter[Any] = Counter()
    for _, weight in named_arrays(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            floating[weight.dtype] += weight.nbytes
    return floating.most_common(1)[0][0] if floating else mx.float32
