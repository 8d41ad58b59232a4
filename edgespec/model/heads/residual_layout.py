"""Read the tensor layouts of Medusa heads (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.errors import CapabilityError, ModelFileError, shorten
from edgespec.model.heads.tensor_files import StoredTensor, read_tensor_files
from edgespec.options.methods import methods
from edgespec.system.files import read_regular_file, reading_model_files

# File name extensions of weight files, in order of preference.
_SUFFIXES = (".safetensors", ".pt", ".bin")
# Name prefix of the residual blocks of Hydra heads.
_HYDRA_BLOCKS = "hydra_mlp."
# Name prefix of the Hydra++ prefix layer (misspelt as in the published files), and the names of its tensors
# in the order of `AttentionLayer`.
_PREFIX_MODEL = "prefix_embeding_layer."
_PREFIX_TENSORS = (
    "layers.0.input_layernorm", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj",
    "layers.0.self_attn.v_proj", "layers.0.self_attn.o_proj", "layers.0.post_attention_layernorm",
    "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "norm",
)  # fmt: skip
# Maximum size of config.json in bytes. Published heads use less than 1 KB.
_MAX_CONFIG_BYTES = 1 << 20


class Linear(NamedTuple):
    """A matrix [outputs, inputs], and a bias [outputs] or None."""

    weight: StoredTensor
    bias: StoredTensor | None


class ResidualBlock(NamedTuple):
    """The weights of `shortcut(x) + silu(linear(x))`. If `shortcut` is None, it is the identity."""

    linear: Linear
    shortcut: Linear | None


class ResidualHead(NamedTuple):
    """Residual blocks and an output matrix. If `output` is None, the target's LM head is used."""

    blocks: tuple[ResidualBlock, ...]
    output: Linear | None


class AttentionLayer(NamedTuple):
    """The weights of a Llama transformer layer and of the norm that follows it."""

    input_norm: StoredTensor
    q_proj: StoredTensor
    k_proj: StoredTensor
    v_proj: StoredTensor
    o_proj: StoredTensor
    post_attention_norm: StoredTensor
    gate_proj: StoredTensor
    up_proj: StoredTensor
    down_proj: StoredTensor
    norm: StoredTensor


@dataclass(frozen=True, slots=True)
class ResidualHeads:
    """The weights of Medusa or Hydra heads.

    From the hidden state at position p, head i predicts the token at position p + i + 2.

    Attributes:
        file: The file that contains the weights.
        heads: The heads, nearest first.
        reads_tokens: Whether head i also reads the embeddings of tokens p + 1 to p + i + 1, as Hydra heads
            do.
        prefix: A layer that attends to the hidden states of all tokens (Hydra++), whose output at position p
            the heads read. None if they read the hidden state itself.
        state_size: Hidden size.
        vocab_size: Number of tokens that can be predicted. 0 if the heads have no output matrices and use the
            target's LM head.
        layers_before_last: Which hidden state the heads read. 0 means the final hidden state, which the
            target's LM head also reads. n means the input of the n-th layer from the end.
    """

    file: Path
    heads: tuple[ResidualHead, ...]
    reads_tokens: bool
    prefix: AttentionLayer | None
    state_size: int
    vocab_size: int
    layers_before_last: int

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors())

    def tensors(self) -> Iterator[StoredTensor]:
        """Iterate over all tensors."""
        for head in self.heads:
            linears = [head.output, *(linear for block in head.blocks for linear in block)]
            yield from (tensor for linear in linears for tensor in linear or () if tensor is not None)
        yield from self.prefix or ()


def _weights_file(path: Path) -> Path | None:
    """Return the weights file of the Medusa or Hydra heads at `path`, or None if there are no such heads."""
    stems = [f"{each.name}_lm_head" for each in methods() if each.head and each.head.network == "residual"]
    if path.is_dir():
        names = (stem + suffix for stem in stems for suffix in _SUFFIXES)
        return next((path / name for name in names if (path / name).is_file()), None)
    return path if path.stem in stems and path.suffix in _SUFFIXES else None


def residual_head_method(path: Path) -> str | None:
    """Return the method of the Medusa or Hydra heads at `path`, or None if there are no such heads."""
    file = _weights_file(path)
    return file.stem.removesuffix("_lm_head") if file else None


def read_residual_heads(path: Path) -> ResidualHeads:
    """Read the tensor metadata of Medusa or Hydra heads. Weights are loaded lazily.

    Args:
        path: The heads' folder, as published on Hugging Face, or the weights file in that folder.

    Raises:
        ModelFileError: The files are missing, damaged or incomplete.
        CapabilityError: The heads are of a kind that edgespec cannot run.
    """
    file = _weights_file(path)
    if file is None:
        raise ModelFileError(
            f"{path} contains no Medusa or Hydra heads",
            "pass the folder with medusa_lm_head or hydra_lm_head, as published on Hugging Face",
            code="wrong_file",
        )
    config = _read_config(file.parent / "config.json")
    kind = config.get("hydra_head_arch", "mlp")
    if kind not in ("mlp", "prefix-mlp"):
        raise CapabilityError(
            f"{path} contains Hydra heads of type {shorten(repr(kind))}, which edgespec cannot run",
            "choose Hydra heads of type 'mlp' or 'prefix-mlp'",
            code="head_not_supported",
        )
    tensors = _NamedTensors(file)
    find = _hydra_heads if tensors.has(_HYDRA_BLOCKS) else _medusa_heads
    return _checked(tensors, find(tensors), _prefix(tensors), int(config.get("hidden_state_offset") or 0))


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return the settings in `config.json`, which is optional because the weights determine all sizes."""
    if not path.exists():
        return {}
    try:
        with reading_model_files(path):
            config = json.loads(read_regular_file(path, _MAX_CONFIG_BYTES).decode("utf-8-sig"))
        if not isinstance(config, dict):
            raise ValueError("the file does not contain a JSON object")
        offset = config.get("hidden_state_offset")
        if offset is not None and not (isinstance(offset, int) and 0 <= offset < 1 << 20):
            raise ValueError(f"hidden_state_offset must be a non-negative whole number, not {offset!r}")
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is damaged: {shorten(error)}", "download it again") from error
    return config


class _NamedTensors:
    """Finds tensors in a file by name."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._tensors = read_tensor_files(file)

    def numbers(self, before: str, after: str) -> list[int]:
        """Return every n with a tensor named `{before}{n}{after}`, in ascending order."""
        pattern = re.compile(rf"{re.escape(before)}(\d{{1,4}}){re.escape(after)}")
        return sorted(int(found[1]) for name in self._tensors if (found := pattern.fullmatch(name)))

    def linear(self, name: str) -> Linear | None:
        """Return the matrix `{name}.weight` with its optional bias, or None if there is no such matrix."""
        weight = self._tensors.get(f"{name}.weight")
        return Linear(weight, self._tensors.get(f"{name}.bias")) if weight else None

    def blocks(self, before: str) -> tuple[ResidualBlock, ...]:
        """Return the residual blocks of a head. Dropout layers can leave gaps in the block numbers."""
        blocks = []
        for number in self.numbers(before, ".linear.weight"):
            linear = self.linear(f"{before}{number}.linear")
            assert linear is not None
            blocks.append(ResidualBlock(linear, self.linear(f"{before}{number}.res_connection")))
        return tuple(blocks)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor. Raises ModelFileError if it is missing."""
        if name not in self._tensors:
            raise self.error(f"the tensor {name} is missing")
        return self._tensors[name]

    def has(self, start: str) -> bool:
        """Return whether the name of any tensor starts with `start`."""
        return any(name.startswith(start) for name in self._tensors)

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(f"the draft head {self.file} is damaged: {reason}", "download it again")


def _medusa_heads(tensors: _NamedTensors) -> tuple[ResidualHead, ...]:
    """Return the Medusa heads. Blocks are named `{i}.{block}.linear`, and output matrices `{i}.{last index}`.

    Heads written by Medusa's current training script ("version 2") have no output matrices.
    """
    heads: list[ResidualHead] = []
    while blocks := tensors.blocks(start := f"{len(heads)}."):
        outputs = tensors.numbers(start, ".weight")
        if len(outputs) > 1:
            raise tensors.error(f"head {len(heads)} has {len(outputs)} output matrices instead of one")
        heads.append(ResidualHead(blocks, tensors.linear(f"{start}{outputs[0]}") if outputs else None))
    return tuple(heads)


def _hydra_heads(tensors: _NamedTensors) -> tuple[ResidualHead, ...]:
    """Return the Hydra heads. Blocks are named `hydra_mlp.{i}.{block}`, and outputs `hydra_lm_head.{i}`.

    An output matrix that follows a dropout is named `hydra_lm_head.{i}.1`.
    """
    heads: list[ResidualHead] = []
    while blocks := tensors.blocks(f"{_HYDRA_BLOCKS}{len(heads)}."):
        name = f"hydra_lm_head.{len(heads)}"
        output = tensors.linear(f"{name}.1") or tensors.linear(name)
        if output is None:
            raise tensors.error(f"the tensor {name}.weight is missing")
        heads.append(ResidualHead(blocks, output))
    return tuple(heads)


def _prefix(tensors: _NamedTensors) -> AttentionLayer | None:
    """Return the prefix layer of Hydra++ heads, or None for other heads."""
    if not tensors.has(_PREFIX_MODEL):
        return None
    names = (f"{_PREFIX_MODEL}{name}.weight" for name in _PREFIX_TENSORS)
    return AttentionLayer._make(map(tensors.tensor, names))


def _checked(
    tensors: _NamedTensors,
    heads: tuple[ResidualHead, ...],
    prefix: AttentionLayer | None,
    layers_before_last: int,
) -> ResidualHeads:
    """Return the heads after checking their shapes. Raises ModelFileError if shapes do not match."""
    if not heads:
        raise tensors.error("the file contains no heads")
    size = _matrix_shape(tensors, heads[0].blocks[0].linear.weight)[0]
    output = heads[0].output
    vocab_size = _matrix_shape(tensors, output.weight)[0] if output else 0
    reads_tokens = heads[0].blocks[0].shortcut is not None
    for number, head in enumerate(heads):
        inputs = size * (number + 2 if reads_tokens else 1)
        for index, block in enumerate(head.blocks):
            if (block.shortcut is not None) != (reads_tokens and index == 0):
                raise tensors.error(
                    f"the res_connection of block {index} of head {number} is missing or unexpected"
                )
            for linear in block:
                _check_shape(tensors, linear, (size, inputs))
            inputs = size
        if (head.output is None) != (output is None):
            raise tensors.error(f"only one of head 0 and head {number} has an output matrix")
        _check_shape(tensors, head.output, (vocab_size, size))
    if prefix:
        _check_prefix_shapes(tensors, prefix, size)
    return ResidualHeads(tensors.file, heads, reads_tokens, prefix, size, vocab_size, layers_before_last)


def _matrix_shape(tensors: _NamedTensors, tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2 or not all(tensor.shape):
        raise tensors.error(f"a tensor with the shape {list(tensor.shape)} is not a matrix")
    return tensor.shape[0], tensor.shape[1]


def _check_shape(tensors: _NamedTensors, linear: Linear | None, shape: tuple[int, int]) -> None:
    for tensor, expected in zip(linear or (), (shape, shape[:1]), strict=False):
        if tensor is not None:
            _check_tensor(tensors, "a weight", tensor, expected)


def _check_prefix_shapes(tensors: _NamedTensors, prefix: AttentionLayer, size: int) -> None:
    keys = _matrix_shape(tensors, prefix.k_proj)[0]
    inner = _matrix_shape(tensors, prefix.gate_proj)[0]
    shapes: tuple[tuple[int, ...], ...] = (
        (size,), (size, size), (keys, size), (keys, size), (size, size),
        (size,), (inner, size), (inner, size), (size, inner), (size,),
    )  # fmt: skip
    for name, tensor, shape in zip(prefix._fields, prefix, shapes, strict=True):
        _check_tensor(tensors, f"the tensor {name}", tensor, shape)


def _check_tensor(tensors: _NamedTensors, name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise tensors.error(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
    if not tensor.is_floating:
        raise tensors.error(f"{name} has type {tensor.dtype}, which is not a floating-point type")
