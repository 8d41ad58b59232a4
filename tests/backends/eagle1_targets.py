"""Tiny targets for EAGLE-1 and EAGLE-2 heads, and a head for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.eagle import Eagle1Head
from edgespec.backends.llamacpp.matrices import FileMatrix
from edgespec.model.base import Head, LanguageModel, LoadOptions
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.backends.published_heads import VOCAB
from tests.backends.tiny_models import write_gemma2, write_jamba, write_lfm2, write_llama, write_mamba
from tests.model.heads.published import write_head

CONTEXT = 512
SIZE = 32
# The scaling of rotary embeddings in some heads.
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": partial(write_llama, layers=3),
    "gemma2": write_gemma2,
    "mamba": partial(write_mamba, layers=3),
    "jamba": write_jamba,
    "lfm2": write_lfm2,
}


def write_eagle1(folder: Path, **options: Any) -> Path:
    return write_head(folder, "EAGLE-1", **{"size": SIZE, "vocab": VOCAB, **options})


def head_of(target: LanguageModel, folder: Path) -> Eagle1Head:
    head = target.self_draft(Head("eagle", folder))
    assert isinstance(head, Eagle1Head)
    return head


def load(path: Path, **options: Any) -> LanguageModel:
    return llamacpp.load(str(path), "target", LoadOptions(**{"context_tokens": CONTEXT, **options}))


def write_files(folder: Path) -> None:
    """Write the targets, a head, and an MLX target with the first target's embeddings and LM head."""
    for name, write in KINDS.items():
        write(folder / f"{name}.gguf")
    write_eagle1(folder / "head")
    config = {"hidden_size": SIZE, "vocab_size": VOCAB, "num_attention_heads": 2, "num_key_value_heads": 2}
    write_checkpoint(folder / "mlx", "llama", config=config)
    weights = dict(load_file(folder / "mlx" / "model.safetensors"))
    for own, name in (("model.embed_tokens", "token_embd"), ("lm_head", "output")):
        weights[f"{own}.weight"] = FileMatrix(folder / "llama.gguf", f"{name}.weight").rows(range(VOCAB))
    save_file(weights, folder / "mlx" / "model.safetensors", {"format": "mlx"})
