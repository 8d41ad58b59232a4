"""Models another runtime already keeps on this machine: the Ollama store, read in place and never written."""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["ollama_model"]

_MODEL_LAYER = "application/vnd.ollama.image.model"


def ollama_model(name: str, tag: str | None) -> Path | None:
    """The GGUF blob of `name:tag` (tag `latest` when None), or None when the store does not hold it."""
    store = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / name / (tag or "latest")
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        # Somebody else's store in a form we do not know is the same as no store.
        return None
    blobs = [store / "blobs" / str(digest).replace(":", "-") for digest in digests]
    return blobs[0] if len(blobs) == 1 and blobs[0].is_file() else None
