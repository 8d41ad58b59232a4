"""MLX checkpoints: loaded piece by piece, with what is known about them and errors one can act on."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.memory_check import check_weights_fit, requested_context
from edgespec.backends.mlx.build_info import mlx_core, mlx_lm_utils
from edgespec.backends.mlx.model_folder import (
    StoredWeights,
    check_adapter,
    check_tokenizer,
    check_weights,
    read_config,
    read_json,
)
from edgespec.errors import CancelledError, EdgespecError, MemoryBudgetError, ModelFileError

if TYPE_CHECKING:
    from edgespec.backends.mlx.low_bit_weights import LowBitWeights

__all__ = ["LoadedModel", "ModelSkeleton", "Sizes", "load_model", "read_skeleton"]

_PIECE_BYTES = 4 * 2**20
_NO_MEMORY = re.compile(r"unable to allocate|out of memory|maximum allowed buffer|bad_alloc", re.IGNORECASE)
_DENSE_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, all its weights in memory, and what is known about it.

    model, tokenizer: an mlx nn.Module and mlx_lm's TokenizerWrapper.
    dtype: the mx.Dtype that the model computes in. widened: halves were made float32 for the CPU.
    weight_bytes, low_bits_bytes: what the model takes, and what being ready for fewer bits takes beside it.
    vocab_size: how many logits the model gives.
    kv_elements_per_token: how many numbers the caches keep of a token.
    low_bits: where it was made ready for drafts of fewer bits.
    trained_context_tokens: 0 where the configuration does not say.
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
        """For people."""
        text = f"{self.architecture} {self.parameters / 1e6:,.1f}M {self.quantisation}"
        return f"{text}, computed in float32" if self.widened else text


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model: bytes of all its weights as they are stored, of those in 16 bits, and what a token adds."""

    tensor_bytes: int
    half_bytes: int
    kv_elements_per_token: int
    trained_context_tokens: int

    def widens(self, options: LoadOptions) -> bool:
        """See `ModelSkeleton`."""
        mx = mlx_core()
        if mx.default_device() != mx.cpu:
            return False
        context = requested_context(options, self.trained_context_tokens)
        more = self.half_bytes + context * self.kv_elements_per_token * mx.float32.size
        limit = (
            options.memory_bytes if options.memory_bytes is not None else psutil.virtual_memory().available
        )
        return bool(self.tensor_bytes + more <= limit)


@dataclass(frozen=True, slots=True)
class ModelSkeleton:
    """A model of which nothing was read but its configuration and the sizes of its weights.

    model: an mlx nn.Module whose arrays are still to be read. The rest as for `LoadedModel`.
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
        """0 where the configuration does not say."""
        return _trained_context(self.config)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the weights as they are stored, and of what being ready for fewer bits takes beside."""
        return self.weights.tensor_bytes + (self.low_bits.nbytes if self.low_bits else 0)

    @property
    def zero_bytes(self) -> int:
        """What the offsets of low halves take, which are made when they are needed."""
        return self.low_bits.nbytes - self.low_bits.array_bytes if self.low_bits else 0

    def widens(self, options: LoadOptions) -> bool:
        """Whether halves become float32: mlx's CPU multiplies quantised weights 9 to 40 times faster then.

        Only where they fit together with the context.
        """
        return self.sizes.widens(options)

    @property
    def sizes(self) -> Sizes:
        """What decides that."""
        halves = self.weights.by_dtype["F16"] + self.weights.by_dtype["BF16"]
        return Sizes(self.tensor_bytes, halves, self.kv_elements_per_token, self.trained_context_tokens)

    def held_bytes(self, widened: bool) -> int:
        """What the weights take in memory."""
        mx = mlx_core()
        halves = (mx.float16, mx.bfloat16)
        arrays = [weight for _, weight in _arrays(self.model.parameters())]
        return sum(weight.nbytes * (2 if widened and weight.dtype in halves else 1) for weight in arrays)


def read_skeleton(path: str, name: str, options: LoadOptions) -> ModelSkeleton:
    """What a folder says of its model. Raises what `load_model` does."""
    folder, adapter = Path(path), None if options.adapter is None else Path(options.adapter)
    with _translated(path):
        config = read_config(folder)
        weights = check_weights(folder)
    if adapter:
        with _translated(str(adapter)):
            weights += check_adapter(adapter)
    check_weights_fit(name, weights.tensor_bytes, options)
    # Some architectures print, and stdout belongs to results.
    with _translated(path), contextlib.redirect_stdout(sys.stderr):
        _check_architecture(folder, config)
        model, config = mlx_lm_utils().load_model(folder, lazy=True)
    # Fresh layers draw random weights that nobody looks at, yet each draw would be remembered for good.
    mlx_core().eval(mlx_core().random.state)
    if adapter:
        with _translated(str(adapter)):
            model = mlx_lm_utils().load_adapters(model, str(adapter))
            model.eval()
    with _translated(path):
        vocab_size, kv_elements = _try_one_token(model)
        quantisation, parameters = (
            _quantisation(model, config, weights),
            mlx_lm_utils().get_total_parameters(model),
        )
        low_bits = _install_low_bit_weights(model) if options.low_bits else None
    return ModelSkeleton(model, config, weights, parameters, quantisation, vocab_size, kv_elements, low_bits)


def load_model(path: str, name: str, options: LoadOptions, progress: Progress | None) -> LoadedModel:
    """Load the model in a folder.

    Raises ModelFileError (not a checkpoint, incomplete, unknown architecture, adapter of another model),
    MemoryBudgetError, BackendMissingError, and CancelledError when `progress` returns False.
    """
    _report(progress, name, 0.0)
    outline = read_skeleton(path, name, options)
    model, config = outline.model, outline.config
    with _translated(path), contextlib.redirect_stdout(sys.stderr):
        check_tokenizer(Path(path))
        tokenizer = _load_tokenizer(Path(path), config)
    with _translated(path):
        low_bits = outline.low_bits
        check_weights_fit(name, outline.tensor_bytes, options)
        widened = _evaluate(
            model, outline.widens(options), lambda fraction: _report(progress, name, fraction)
        )
        held_bytes = sum(weight.nbytes for _, weight in _arrays(model.parameters()))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        architecture=config["model_type"],
        parameters=outline.parameters,
        file_bytes=outline.weights.file_bytes,
        weight_bytes=held_bytes - (low_bits.array_bytes if low_bits else 0),
        low_bits_bytes=low_bits.nbytes if low_bits else 0,
        quantisation=outline.quantisation,
        widened=widened,
        trained_context_tokens=outline.trained_context_tokens,
        vocab_size=outline.vocab_size,
        kv_elements_per_token=outline.kv_elements_per_token,
        dtype=_dtype(model),
        low_bits=low_bits,
    )


def _install_low_bit_weights(model: Any) -> LowBitWeights:
    from edgespec.backends.mlx.low_bit_weights import install_low_bit_weights

    return install_low_bit_weights(model, lambda: _try_one_token(model))


def _report(progress: Progress | None, name: str, fraction: float) -> None:
    if progress is not None and not progress(f"loading {name}", fraction):
        raise CancelledError(f"loading {name} was cancelled")


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    """Raises ModelFileError for an architecture that mlx-lm has no file for."""
    known = re.fullmatch(r"[\w-]+", config["model_type"]) is not None
    if known:
        try:
            mlx_lm_utils()._get_classes(config)
        except (ValueError, AttributeError, SystemExit):  # olmo exits where its library is missing
            known = False
    if not known:
        from mlx_lm import __version__ as version

        raise ModelFileError(
            f"{folder} has the architecture {config['model_type']!r}, which mlx-lm {version} does not know",
            "update mlx-lm or choose another model",
        )


def _load_tokenizer(folder: Path, config: dict[str, Any]) -> Any:
    """mlx_lm's TokenizerWrapper; the end tokens of all the model's files count."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    ends: set[int] = set()
    sources = [config, config.get("text_config")]
    if (folder / "generation_config.json").exists():
        sources.append(read_json(folder, "generation_config.json"))
    for source in sources:
        end = source.get("eos_token_id") if isinstance(source, dict) else None
        ends.update(token for token in (end if isinstance(end, list) else [end]) if isinstance(token, int))
    offline = {"local_files_only": True, "trust_remote_code": False}
    return mlx_lm_utils().load_tokenizer(folder, offline, eos_token_ids=sorted(ends))


def _evaluate(model: Any, widen: bool, report: Callable[[float], None]) -> bool:
    """Bring all weights into memory, piece by piece; True when halves were widened to float32.

    mlx evaluates an array only in the thread that made it, and a model may run in another one.
    """
    from mlx.utils import tree_unflatten

    mx = mlx_core()
    # Taken from the list one by one, so that no half stays beside its wider self: the largest first, while
    # there is room for both.
    waiting = sorted(_arrays(model.parameters()), key=lambda each: each[1].nbytes)
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
    # Tables that are no parameters, such as rotary frequencies, are lazy as well.
    mx.eval([array for _, array in _arrays(model)])
    return widened


def _arrays(tree: Any) -> list[tuple[str, Any]]:
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(tree)
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, mlx_core().array)]


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Whatever the file system, mlx, mlx-lm and transformers raise, as one line."""
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
            raise MemoryBudgetError(
                f"there is no memory for {path}: {text}",
                "close other programs or choose a smaller quantisation",
            ) from error
        if isinstance(error, OSError) and error.strerror:
            raise ModelFileError(
                f"{error.filename or path} cannot be read: {error.strerror}", "check the path and its rights"
            ) from error
        detail = text if len(text) <= 300 else f"{text[:300]}..."
        raise ModelFileError(f"{path} could not be loaded: {detail}", "check or replace its files") from error


def _dtype(model: Any) -> Any:
    """What most floating-point weights are: quantised ones count by their scales."""
    mx = mlx_core()
    floating: Counter[Any] = Counter()
    for _, weight in _arrays(model.parameters()):
        if mx.issubdtype(weight.dtype, mx.floating):
            floating[weight.dtype] += weight.nbytes
    return floating.most_common(1)[0][0] if floating else mx.float32


def _quantisation(model: Any, config: dict[str, Any], weights: StoredWeights) -> str:
    """What most weights are stored as."""
    kinds: Counter[str] = Counter()
    for module in model.modules():
        # A module is a dict of its arrays; only quantised ones keep scales beside their weight.
        if "scales" in module and "weight" in module:
            mode = getattr(module, "mode", "affine")
            plain = mode != "affine"
            kinds[mode if plain else f"{module.bits}-bit affine, group {module.group_size}"] += (
                module.weight.nbytes
            )
    if kinds:
        (most, _), *others = kinds.most_common()
        return f"{most} (mixed)" if others else most
    method = (config.get("quantization_config") or {}).get("quant_method")
    ((dense, _),) = weights.by_dtype.most_common(1)
    return str(method or _DENSE_NAMES.get(dense, dense.lower()))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Models that also see keep the numbers of their language part apart."""
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
    said = (text.get(key) for key in keys)
    return next((tokens for tokens in said if isinstance(tokens, int) and 0 < tokens < 1 << 31), 0)


def _try_one_token(model: Any) -> tuple[int, int]:
    """How many logits it gives, and how many numbers its caches keep of a token.

    Only the shapes are asked for, so mlx computes nothing.
    """
    from mlx_lm.models import cache as kinds

    keeping = (kinds.KVCache, kinds.RotatingKVCache, kinds.ChunkedKVCache)
    caches = kinds.make_prompt_cache(model)
    logits = model(mlx_core().array([[0]]), cache=caches)
    elements = 0
    for cache in caches:
        for part in cache.caches if isinstance(cache, kinds.CacheList) else (cache,):
            if isinstance(part, keeping) and part.keys is not None:
                # [batch, heads, tokens, size]
                kept: list[Any] = [part.keys, part.values]
                elements += sum(array.shape[1] * array.shape[3] for array in kept)
    return logits.shape[-1], elements
