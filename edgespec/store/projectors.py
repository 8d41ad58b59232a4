"""Find the projector (mmproj file) of a model on this machine, which turns images into what it reads."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from edgespec.errors import ModelFileError
from edgespec.model.formats.projector import read_projector
from edgespec.store.hub_files import best_projector
from edgespec.store.installed import model_info_or_none
from edgespec.store.reference import Resolved

__all__ = ["find_projector"]


def find_projector(model: Resolved) -> Path | None:
    """Return the projector that is stored with a model, or None.

    It is part of an Ollama model, or in the folder of the model's file, as in LM Studio and the Hugging Face
    cache.
    """
    if model.projector:
        return model.projector
    info = model_info_or_none(model)
    folder = model.path.parent
    names: list[str] = []
    with suppress(OSError):
        names = [path.name for path in folder.iterdir()]
    # A folder can contain the projectors of other models.
    while info and (name := best_projector(names, model.path.name)):
        with suppress(ModelFileError):
            if read_projector(folder / name).hidden_size == info.hidden_size:
                return folder / name
        names.remove(name)
    return None
