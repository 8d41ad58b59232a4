"""Tiny GGUF targets with MTP layers, and their heads."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from edgespec.backends import llamacpp
from edgespec.model.base import Head, LanguageModel, LoadOptions
from edgespec.model.hidden_states import HeadModel
from tests.backends.tiny_mtp_models import write_mtp_model, write_mtp_sidecar

CONTEXT = 512


class Files:
    """A target with MTP layers, and another file that contains only these layers."""

    def __init__(self, folder: Path, architecture: str, mtp_layers: int = 1) -> None:
        self.target = write_mtp_model(folder / "target.gguf", architecture, mtp_layers=mtp_layers)
        # It would be found automatically if it were next to the target and named `mtp-target.gguf`.
        self.sidecar = write_mtp_sidecar(folder / "layers.gguf", self.target)

    def load(self, mtp: bool = True, context: int = CONTEXT) -> LanguageModel:
        return llamacpp.load(str(self.target), "target", LoadOptions(context_tokens=context, own_head=mtp))


def head_of(target: LanguageModel, path: Path | None = None) -> HeadModel:
    return cast(HeadModel, target.self_draft(Head("mtp", path)))
