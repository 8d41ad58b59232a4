"""Explain to users why llama.cpp cannot load some intact model files made by other programs.

Each table has one entry per quirk. Unusual file names and indexes are handled in `gguf_files` and
`mlx_files`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from edgespec.errors import shorten
from edgespec.model.formats.gguf_header import GgufHeader

# Maps name prefixes of tensors outside the language model to the components that they belong to. llama.cpp
# loads these tensors from a separate file (mmproj). Ollama stores them in the model's own file, for its own
# engine.
_FOREIGN_PARTS = {
    "v.": "an image encoder",
    "mm.": "an image projector",
    "vision_tower.": "an image encoder",
    "vision_model.": "an image encoder",
    "multi_modal_projector.": "an image projector",
    "a.": "an audio encoder",
    "s.": "a sound decoder",
}
# Names of architectures that only Ollama's own engine supports. llama.cpp uses different names for some of
# them.
_OLLAMA_ARCHITECTURES = ("gptoss", "mllama", "qwen25vl", "deepseekocr", "glmocr")
_OTHER_VERSION = "choose a version of the model that was made for llama.cpp, for example from Hugging Face"
_UPDATE = "update llama-cpp-python, or choose another model"
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
# Tensors whose first dimension is the hidden size.
_HIDDEN_SIZE_TENSORS = ("token_embd.weight", "output.weight", "output_norm.weight")
# Each layer of an ordinary model contains all tensors of at least one of these sets.
_USUAL_TENSORS = tuple(
    {f"{name}.weight" for name in ("attn_norm", "attn_output", *attention, *feed_forward)}
    for attention in (("attn_q", "attn_k", "attn_v"), ("attn_qkv",))
    for feed_forward in (
        ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
        ("ffn_norm", "ffn_up", "ffn_down"),
        ("ffn_norm", "ffn_gate_inp", "ffn_up_exps", "ffn_down_exps"),
    )
)


class Refusal(NamedTuple):
    """Why llama.cpp cannot load an undamaged file, and what the user can do about it.

    Attributes:
        what: The end of a sentence that begins with the file's path.
        next_step: What the user can do.
    """

    what: str
    next_step: str


# llama.cpp's messages about files that are complete but not in the form that it expects: a pattern of the
# message, what it means, and what the user can do. `{0}`, `{1}` and so on stand for the captured groups.
_REFUSALS = (
    (
        r"unknown model architecture: '([^']*)'",
        "has the architecture '{0}', which the installed llama.cpp does not support",
        _UPDATE,
    ),
    (
        r"unknown pre-tokenizer type: '([^']*)'",
        "has a tokenizer of the type '{0}', which the installed llama.cpp does not support",
        _UPDATE,
    ),
    (
        r"wrong number of tensors; expected (\d+), got (\d+)",
        "has {0} tensors, but its architecture '{architecture}' uses only {1} of them{extra}",
        _OTHER_VERSION,
    ),
    (
        r"(?:missing tensor '|tensor '(?=[^']*' not found))([^']*)'",
        "lacks the tensor '{0}', which its architecture '{architecture}' needs",
        _OTHER_VERSION,
    ),
    (
        r"tensor '([^']*)' has wrong shape; expected ([\d, ]+), got ([\d, ]+)",
        "has a tensor '{0}' of shape {2}, but its metadata requires the shape {1}",
        _OTHER_VERSION,
    ),
    (
        r"key not found in model: (\S+)",
        "lacks the setting '{0}', which its architecture '{architecture}' needs",
        _OTHER_VERSION,
    ),
    (
        r"(?:key |error loading model hyperparameters: )(\S+) has wrong (array length|type) ?([^;]*)",
        "has a setting '{0}' with a wrong {1}",
        _OTHER_VERSION,
    ),
    (
        r"tensor '([^']*)' has invalid ggml type (\d+)",
        "has a tensor '{0}' of the type {1}, which the installed llama.cpp does not support",
        _UPDATE,
    ),
)


def explain_refusal(log: str, headers: Sequence[GgufHeader]) -> Refusal | None:
    """Explain why llama.cpp rejects an undamaged file, or return None if the reason is unknown.

    Args:
        log: The messages that llama.cpp logged.
        headers: The headers of the model's files.
    """
    found = ((re.search(message, log), what, next_step) for message, what, next_step in _REFUSALS)
    match, what, next_step = next((each for each in found if each[0]), (None, "", ""))
    if match is None:
        return None
    architecture = headers[0].architecture if headers else ""
    names = [tensor.name for header in headers for tensor in header.tensors]
    if part := foreign_part(names):
        return Refusal(
            f"contains {part}, like files made for Ollama's own engine, so llama.cpp cannot load it",
            _OTHER_VERSION,
        )
    if architecture in _OLLAMA_ARCHITECTURES:
        return Refusal(
            f"has the architecture '{architecture}', which only Ollama's own engine supports", _OTHER_VERSION
        )
    unused = _unused_tensors(architecture, names)
    extra = f"; for example, it does not use {unused[0]}" if unused else ""
    groups = [shorten(group.strip()) for group in match.groups()]
    return Refusal(what.format(*groups, architecture=architecture, extra=extra), next_step)


def foreign_part(tensor_names: Sequence[str]) -> str:
    """Describe what the tensors contain besides a language model, or return an empty string.

    For example: `an image encoder (v.patch_embd.weight and 2 more tensors)`.
    """
    for prefix, part in _FOREIGN_PARTS.items():
        if found := [name for name in tensor_names if name.startswith(prefix)]:
            more = f" and {len(found) - 1} more tensors" if len(found) > 1 else ""
            return f"{part} ({shorten(found[0])}{more})"
    return ""


def why_doubtful(headers: Sequence[GgufHeader]) -> str:
    """Return why llama.cpp might reject a model, judging by the names and shapes of its tensors.

    This is fast but not reliable, because a newer llama.cpp may support tensors that the tables lack.
    `why_refused` gives a reliable answer by asking llama.cpp itself.

    Args:
        headers: The headers of all of the model's files.
    """
    first = headers[0]
    tensors = [tensor for header in headers for tensor in header.tensors]
    names = [tensor.name for tensor in tensors]
    if part := foreign_part(names):
        return f"contains {part}"
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    if first.architecture not in gguf.MODEL_ARCH_NAMES.values():
        return "unknown architecture"
    if unused := _unused_tensors(first.architecture, names):
        return f"unused tensor {shorten(unused[0])}"
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    size = first.architecture_number("embedding_length")
    if "token_embd.weight" not in shapes or "output_norm.weight" not in shapes:
        return "no embeddings or no output norm"
    if size and any(shapes[name][:1] != (size,) for name in _HIDDEN_SIZE_TENSORS if name in shapes):
        return "a different hidden size from its metadata"
    return _uneven_layers(first.architecture_number("block_count"), shapes)


def _uneven_layers(count: int, shapes: dict[str, tuple[int, ...]]) -> str:
    """Describe what is unusual about the layers' tensors, or return an empty string."""
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = shape
    kinds = {tuple(sorted(layer.items())) for layer in layers.values()}
    if len(kinds) > 1 or len(layers) != count:
        return "layers with different tensors"
    suffixes = {name for layer in layers.values() for name in layer}
    return "" if any(usual <= suffixes for usual in _USUAL_TENSORS) else "layers without the usual tensors"


def _unused_tensors(architecture: str, names: Sequence[str]) -> list[str]:
    """Return the tensors that the architecture does not use, according to the gguf package."""
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
    if known is None:
        return []
    used = {gguf.TENSOR_NAMES[tensor].replace("{bid}", "#") for tensor in gguf.MODEL_TENSORS[known]}
    return [name for name in names if re.sub(r"^blk\.\d+\.", "blk.#.", name).rpartition(".")[0] not in used]
