"""Create a model from its configuration, with lazy weights whose data has not been read yet."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from edgespec.backends.base import LoadOptions
from edgespec.backends.memory_check import check_weights_fit, requested_context
from edgespec.backends.mlx.build_info import mlx_core, mlx_lm_utils
from edgespec.backends.mlx.model_folder import StoredWeights, check_adapter, check_weights, read_config
from edgespec.errors import EdgespecError, MemoryBudgetError, ModelFileError

if TYPE_CHECKING:
    from edgespec.backends.mlx.low_bit_weights import LowBitWeights

__all__ = ["ModelSkeleton", "WeightSizes", "named_arrays", "read_skeleton", "translate_load_errors"]

_OUT_OF_MEMORY = re.compile(
    r"unable to allocate|out of memory|maximum allowed buffer|bad_alloc", re.IGNORECASE
)
_DENSE_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
# Maximum number of characters of an exception's text in an error message.
_MAX_DETAIL_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Sizes used to decide whether to widen 16-bit weights to float32.

    Attributes:
        tensor_bytes: Size of all weights as stored, in bytes.
        half_bytes: Size of the 16-bit weights, in bytes.
        kv_elements_per_token: Number of array elements in the KV caches per token.
        trained_context_tokens: Context length that the model was trained for; 0 if unknown.
    """

    tensor_bytes: int
    half_bytes: int
    kv_elements_per_token: int
    trained_context_tokens: int

    def widens(self, options: LoadOptions) -> bool:
        """Return whether to widen 16-bit weights to float32.

        On a CPU, mlx multiplies quantised weights 9 to 40 times faster in float32 (measured). We therefore
        widen the weights on a CPU if the widened weights and the full context fit in memory.
        """
        mx = mlx_core()
        if mx.default_device() != mx.cpu:
            return False
        context = requested_context(options, self.trained_context_tokens)
        extra_bytes = self.half_bytes + context * self.kv_elements_per_token * mx.float32.size
        limit = (
            options.memory_bytes if options.memory_bytes is not None else psutil.virtual_memory().available
        )
        return bool(self.tensor_bytes + extra_bytes <= limit)


@dataclass(frozen=True, slots=True)
class ModelSkeleton:
    """A model with lazy weights.

    Only the configuration and the headers of the weight files have been read.

    Attributes:
        model: An mlx `nn.Module`.
        config: The contents of config.json.
        weights: Sizes of the weight files.
        parameters: Number of parameters.
        quantisation: Quantisation or data type of most weights.
        vocab_size: Number of logits per token.
        kv_elements_per_token: Number of array elements in the KV caches per token.
        low_bits: Weights that can be read with fewer bits, or None if they were not requested.
    """

    model: Any = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    weights: StoredWeights
    parameters: int
    quantisation: str
    vocab_size: int
    kv_elements_per_token: int
    low_bits: LowBitWeights | None

    @property
    def trained_context_tokens(self) -> int:
        """Context length that the model was trained for, or 0 if the configuration does not contain it."""
        return _trained_context(self.config)

    @property
    def tensor_bytes(self) -> int:
        """Size of the weights as stored, plus the memory added by low-bit weights, in bytes."""
        return self.weights.tensor_bytes + (self.low_bits.nbytes if self.low_bits else 0)

    @property
    def zero_bytes(self) -> int:
        """Size in bytes of the shared arrays of zeros that the first pass allocates for low-bit weights."""
        return self.low_bits.nbytes - self.low_bits.array_bytes if self.low_bits else 0

    @property
    def sizes(self) -> WeightSizes:
        halves = self.weights.by_dtype["F16"] + self.weights.by_dtype["BF16"]
        return WeightSizes(self.tensor_bytes, halves, self.kv_elements_per_token, self.trained_context_tokens)

    def held_bytes(self, widened: bool) -> int:
        """Return the size that the weights will have in memory, in bytes, optionally widened to float32."""
        mx = mlx_core()
        halves = (mx.float16, mx.bfloat16)
        arrays = [weight for _, weight in named_arrays(self.model.parameters())]
        return sum(weight.nbytes * (2 if widened and weight.dtype in halves else 1) for weight in arrays)


def read_skeleton(path: str, name: str, options: LoadOptions) -> ModelSkeleton:
    """Create the model in a folder with lazy weights.

    Args:
        path: Path of the model folder.
        name: Model name for error messages.
        options: Load options. Only the adapter, `low_bits` and the memory limit are used.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        MemoryBudgetError: The weights exceed the memory limit.
        BackendMissingError: mlx or mlx-lm is not installed.
    """
    folder, adapter = Path(path), None if options.adapter is None else Path(options.adapter)
    with translate_load_errors(path):
        config = read_config(folder)
        weights = check_weights(folder)
    if adapter:
        with translate_load_errors(str(adapter)):
            weights += check_adapter(adapter)
    check_weights_fit(name, weights.tensor_bytes, options)
    # Some architectures print messages to stdout. Redirect them, because stdout is reserved for results.
    with translate_load_errors(path), contextlib.redirect_stdout(sys.stderr):
        _check_architecture(folder, config)
        model, config = mlx_lm_utils().load_model(folder, lazy=True)
    # mlx-lm initialises all layers with random weights that are never used. Evaluating the random state frees
    # the graph of these weights.
    mlx_core().eval(mlx_core().random.state)
    if adapter:
        with translate_load_errors(str(adapter)):
            model = mlx_lm_utils().load_adapters(model, str(adapter))
            model.eval()
    with translate_load_errors(path):
        vocab_size, kv_elements = _trace_one_token(model)
        quantisation = _describe_quantisation(model, config, weights)
        parameters = mlx_lm_utils().get_total_parameters(model)
        low_bits = _install_low_bits(model) if options.low_bits else None
    return ModelSkeleton(model, config, weights, parameters, quantisation, vocab_size, kv_elements, low_bits)


def _install_low_bits(model: Any) -> LowBitWeights:
    from edgespec.backends.mlx.low_bit_weights import install_low_bit_weights

    return install_low_bit_weights(model, lambda: _trace_one_token(model))


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelFileError if mlx-lm does not support the architecture."""
    known = re.fullmatch(r"[\w-]+", config["model_type"]) is not None
    if known:
        try:
            mlx_lm_utils()._get_classes(config)
        except (ValueError, AttributeError, SystemExit):  # olmo calls exit() if its library is missing.
            known = False
    if not known:
        from mlx_lm import __version__ as version

        raise ModelFileError(
            f"{folder} uses architecture {config['model_type']!r}, which mlx-lm {version} does not support",
            "update mlx-lm or choose another model",
        )


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Return all mlx arrays in a tree of modules, lists and dicts, with their dotted names."""
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(tree)
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, mlx_core().array)]


@contextlib.contextmanager
def translate_load_errors(path: str) -> Iterator[None]:
    """Translate exceptions of the file system, mlx, mlx-lm and transformers to one-line EdgespecErrors."""
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
            raise MemoryBudgetError(
                f"not enough memory to load {path}: {text}",
                "close other programs or choose a smaller quantisation",
            ) from error
        if isinstance(error, OSError) and error.strerror:
            raise ModelFileError(
                f"{error.filename or path} cannot be read: {error.strerror}",
                "check the path and its permissions",
            ) from error
        detail = text if len(text) <= _MAX_DETAIL_CHARACTERS else f"{text[:_MAX_DETAIL_CHARACTERS]}..."
        raise ModelFileError(f"{path} could not be loaded: {detail}", "check or replace its files") from error


def _describe_quantisation(model: Any, config: dict[str, Any], weights: StoredWeights) -> str:
    """Return the quantisation, or else the data type, of most weights."""
    kinds: Counter[str] = Counter()
    for module in model.modules():
        # An mlx module is a dict of arrays. Only quantised modules have both a weight and scales.
        if "scales" in module and "weight" in module:
            mode = getattr(module, "mode", "affine")
            kind = mode if mode != "affine" else f"{module.bits}-bit affine, group {module.group_size}"
            kinds[kind] += module.weight.nbytes
    if kinds:
        (most_common, _), *others = kinds.most_common()
        return f"{most_common} (mixed)" if others else most_common
    method = (config.get("quantization_config") or {}).get("quant_method")
    ((dense, _),) = weights.by_dtype.most_common(1)
    return str(method or _DENSE_NAMES.get(dense, dense.lower()))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model, which vision models store under `text_config`."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _trained_context(config: dict[str, Any]) -> int:
    text = _text_config(config)
    keys = (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "n_ctx",
    )
    values = (text.get(key) for key in keys)
    return next((tokens for tokens in values if isinstance(tokens, int) and 0 < tokens < 1 << 31), 0)


def _trace_one_token(model: Any) -> tuple[int, int]:
    """Build the graph of a pass over one token without evaluating it.

    Returns:
        The number of logits per token, and the number of array elements in the KV caches per token.
    """
    from mlx_lm.models import cache as kinds

    kv_kinds = (kinds.KVCache, kinds.RotatingKVCache, kinds.ChunkedKVCache)
    caches = kinds.make_prompt_cache(model)
    logits = model(mlx_core().array([[0]]), cache=caches)
    elements = 0
    for cache in caches:
        for part in cache.caches if isinstance(cache, kinds.CacheList) else (cache,):
            if isinstance(part, kv_kinds) and part.keys is not None:
                # [batch, heads, tokens, size]
                arrays: list[Any] = [part.keys, part.values]
                elements += sum(array.shape[1] * array.shape[3] for array in arrays)
    return logits.shape[-1], elements
