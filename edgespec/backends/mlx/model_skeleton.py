"""Build a model from its configuration, with lazy weights that have not been read yet."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from edgespec.backends.mlx.build_info import mlx_core, mlx_lm_utils, runs_on_cpu, use_in_this_process
from edgespec.errors import EdgespecError, MemoryBudgetError, ModelFileError
from edgespec.model.base import LoadOptions
from edgespec.model.formats.mlx_files import (
    missing_files,
    read_json_object,
    readable_folder,
    weight_files,
)
from edgespec.model.formats.mlx_metadata import trained_context
from edgespec.model.heads.tensor_files import read_tensors
from edgespec.model.memory_estimate import check_weights_fit, requested_context

if TYPE_CHECKING:
    from edgespec.backends.mlx.layer_caches import LayerCaches
    from edgespec.backends.mlx.low_bit_weights import LowBitWeights

__all__ = [
    "ModelSkeleton",
    "WeightSizes",
    "check_complete",
    "named_arrays",
    "parameter_bytes",
    "read_skeleton",
    "trace_one_token",
    "translate_load_errors",
]

_OUT_OF_MEMORY = re.compile(
    r"unable to allocate|out of memory|maximum allowed buffer|bad_alloc", re.IGNORECASE
)
_DENSE_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_MAX_DETAIL_CHARACTERS = 300


class WeightSizes(NamedTuple):
    """Sizes used to decide whether to widen 16-bit weights to float32.

    Attributes:
        tensor_bytes: Size in bytes of all weights, including those added for low-bit drafting. FP8 weights
            count as the 16-bit weights that mlx-lm converts them to.
        half_bytes: Size of the 16-bit weights, in bytes.
        kv_elements_per_token: Number of array elements in the KV caches per token.
        trained_context_tokens: Context length that the model was trained for. 0 if unknown.
    """

    tensor_bytes: int
    half_bytes: int
    kv_elements_per_token: int
    trained_context_tokens: int

    def widens(self, options: LoadOptions) -> bool:
        """Return whether to widen 16-bit weights to float32.

        On CPUs, mlx multiplies quantised weights 9 to 40 times faster in float32 (measured), so we widen the
        weights if they still fit in memory together with the full context.
        """
        if not runs_on_cpu():
            return False
        context = requested_context(options, self.trained_context_tokens)
        extra_bytes = self.half_bytes + context * self.kv_elements_per_token * 4
        limit = psutil.virtual_memory().available if options.memory_bytes is None else options.memory_bytes
        return self.tensor_bytes + extra_bytes <= limit


@dataclass(frozen=True, slots=True)
class ModelSkeleton:
    """A model with lazy weights, built from its configuration and file headers alone.

    Attributes:
        model: An mlx `nn.Module`.
        config: The contents of config.json.
        parameters: Number of parameters.
        quantisation: Most common quantisation of the weights, or their data type if they are not quantised.
        vocab_size: Number of logits per token, which can exceed the tokenizer's vocabulary.
        low_bits: Weights that can be read at reduced precision, or None if they were not requested.
    """

    model: Any = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    sizes: WeightSizes
    file_bytes: int
    parameters: int
    quantisation: str
    vocab_size: int
    low_bits: LowBitWeights | None


def read_skeleton(path: str, name: str, options: LoadOptions) -> ModelSkeleton:
    """Load a model from a folder without reading its weights.

    Uses only the first adapter, `low_bits` and the memory limit from `options`.

    Raises:
        ModelFileError: The folder does not contain a model, or the model is damaged or unsupported.
        MemoryBudgetError: The weights exceed the memory limit.
    """
    use_in_this_process()
    folder, adapter = Path(path), options.adapters[0].path if options.adapters else None
    with translate_load_errors(path):
        config = _read_config(folder)
        files = weight_files(folder)
    if adapter is not None:
        with translate_load_errors(adapter):
            files.append(_adapter_file(Path(adapter)))
    by_dtype: Counter[str] = Counter()
    for file in files:
        for tensor in read_tensors(file).values():
            by_dtype[tensor.dtype] += tensor.size_bytes
    if not by_dtype:
        raise ModelFileError(f"{files[0]} contains no tensors", "download the model again")
    check_weights_fit(name, by_dtype.total(), options)
    # Redirect stdout, which is reserved for results, because some mlx-lm models print to it.
    with translate_load_errors(path), contextlib.redirect_stdout(sys.stderr):
        _check_architecture(folder, config)
        with readable_folder(folder) as readable:
            model, config = mlx_lm_utils().load_model(readable, lazy=True)
    # Evaluate MLX's random state to free the graph of the unused random initial weights.
    mlx_core().eval(mlx_core().random.state)
    if adapter is not None:
        with translate_load_errors(adapter):
            model = mlx_lm_utils().load_adapters(model, adapter)
            model.eval()
    with translate_load_errors(path):
        vocab_size, caches = trace_one_token(model)
        quantisation = _describe_quantisation(model, config, by_dtype)
        parameters = mlx_lm_utils().get_total_parameters(model)
        weights = [array for _, array in named_arrays(model.parameters())]
        half_types = (mlx_core().float16, mlx_core().bfloat16)
        low_bits = None
        if options.low_bits:
            from edgespec.backends.mlx.low_bit_weights import install_low_bit_weights

            low_bits = install_low_bit_weights(model, lambda: trace_one_token(model))
        sizes = WeightSizes(
            sum(array.nbytes for array in weights) + (low_bits.nbytes if low_bits else 0),
            sum(array.nbytes for array in weights if array.dtype in half_types),
            _kv_elements(caches),
            trained_context(config),
        )
        file_bytes = sum(file.stat().st_size for file in files)
    return ModelSkeleton(model, config, sizes, file_bytes, parameters, quantisation, vocab_size, low_bits)


def _read_config(folder: Path) -> dict[str, Any]:
    # The tokenizer is optional, because `edgespec plan` does not download it.
    check_complete(folder, optional="tokenizer.json")
    # Reject named pipes, because mlx-lm and transformers would wait forever when opening them.
    for path in sorted(folder.iterdir()):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelFileError(f"{path} is a pipe or a device instead of a file", "delete it")
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelFileError(
            f"{folder / 'config.json'} has no model_type",
            "choose a folder that contains a language model",
            code="wrong_file",
        )
    if config.get("model_file") is not None:
        raise ModelFileError(
            f"{folder} needs its own Python file, {str(config['model_file'])!r}, but edgespec never runs"
            " code that comes with a model",
            "choose a model that mlx-lm supports without custom code",
            code="model_file_not_supported",
        )
    return config


def check_complete(folder: Path, optional: str = "") -> None:
    """Raise ModelFileError if a model's folder lacks files other than `optional`."""
    if missing := [name for name in missing_files(folder) if name != optional]:
        raise ModelFileError(
            f"{folder} lacks {', '.join(missing[:3])}",
            "download the model again",
            code="model_file_incomplete",
        )


def _adapter_file(folder: Path) -> Path:
    weights = folder / "adapters.safetensors"
    if (folder / "adapter_model.safetensors").exists() and not weights.exists():
        raise ModelFileError(
            f"{folder} contains a PEFT adapter, not an mlx-lm adapter",
            "train it with mlx-lm, or convert it to mlx-lm's format",
            code="adapter_unusable",
        )
    for file in (folder / "adapter_config.json", weights):
        if not file.exists():
            raise ModelFileError(
                f"{folder} lacks {file.name}",
                "use the folder that `mlx_lm.lora --adapter-path` wrote",
                code="adapter_unusable",
            )
    read_json_object(folder / "adapter_config.json")
    return weights


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    if re.fullmatch(r"[\w-]+", config["model_type"]):
        # Suppress SystemExit, because mlx-lm's OLMo implementation calls exit() if a library is missing.
        with contextlib.suppress(ValueError, AttributeError, SystemExit):
            mlx_lm_utils()._get_classes(config)
            return
    from mlx_lm import __version__ as version

    raise ModelFileError(
        f"{folder} uses the architecture {config['model_type']!r}, which mlx-lm {version} does not support",
        "update mlx-lm or choose another model",
        code="model_file_not_supported",
    )


def parameter_bytes(module: Any) -> int:
    """Return the total size of an mlx module's parameters in bytes."""
    return sum(array.nbytes for _, array in named_arrays(module.parameters()))


def named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """Return all mlx arrays in a tree of modules, lists and dicts, with their dotted paths."""
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(tree)
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, mlx_core().array)]


@contextlib.contextmanager
def translate_load_errors(path: str) -> Iterator[None]:
    """Convert errors from file access, mlx, mlx-lm and transformers inside the block to EdgespecErrors."""
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
            raise MemoryBudgetError(
                f"there is not enough memory to load {path}: {text}",
                "close other programs or choose a smaller quantisation",
                code="out_of_memory",
            ) from error
        if isinstance(error, OSError) and error.strerror:
            raise ModelFileError(
                f"{error.filename or path} cannot be read: {error.strerror}",
                "check the path and its permissions",
                code="model_file_unreadable",
            ) from error
        detail = text if len(text) <= _MAX_DETAIL_CHARACTERS else f"{text[:_MAX_DETAIL_CHARACTERS]}..."
        raise ModelFileError(
            f"{path} could not be loaded: {detail}", "check its files, or download them again"
        ) from error


def _describe_quantisation(model: Any, config: dict[str, Any], by_dtype: Counter[str]) -> str:
    kinds: Counter[str] = Counter()
    for module in model.modules():
        # MLX modules are dicts of arrays. Only quantised ones have both a weight and scales.
        if "scales" in module and "weight" in module:
            mode = getattr(module, "mode", "affine")
            kind = mode if mode != "affine" else f"{module.bits}-bit affine, group {module.group_size}"
            kinds[kind] += module.weight.nbytes
    if kinds:
        (most_common, _), *others = kinds.most_common()
        return f"{most_common} (mixed)" if others else most_common
    method = (config.get("quantization_config") or {}).get("quant_method")
    ((dense, _),) = by_dtype.most_common(1)
    return str(method or _DENSE_NAMES.get(dense, dense.lower()))


def trace_one_token(model: Any, kv_bits: int | None = None) -> tuple[int, LayerCaches]:
    """Build the graph of a one-token pass without evaluating it.

    Returns:
        The number of logits per token, and the caches after the pass.
    """
    from edgespec.backends.mlx.attention_cache import PassLayout
    from edgespec.backends.mlx.layer_caches import LayerCaches

    caches = LayerCaches(model, PassLayout(), kv_bits)
    logits = model(mlx_core().array([[0]]), cache=caches.layers)
    return logits.shape[-1], caches


def _kv_elements(caches: LayerCaches) -> int:
    arrays = named_arrays([cache.state for cache in (*caches.attention, *caches.unsupported)])
    # Cached keys and values have shape [batch, heads, tokens, size].
    return sum(array.shape[1] * array.shape[3] for _, array in arrays if array.ndim == 4)
