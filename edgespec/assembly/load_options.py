"""How both models are to be loaded: options that are checked before anything is looked for."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from edgespec.assembly.drafting_options import Drafting
from edgespec.backends.base import LoadOptions
from edgespec.checks import check_boolean, check_integer, check_path, check_text
from edgespec.errors import OptionError
from edgespec.memory import available_bytes

__all__ = ["load_options"]

_NO_LIMIT = (1 << 31) - 1


def load_options(
    how: Drafting,
    *,
    given_bytes: int | None,
    context: int | None,
    gpu_layers: int | None,
    kv_type: str,
    flash_attention: str,
    mmap: bool,
    mlock: bool,
    adapter: str | PathLike[str] | None,
    exact: bool,
    threads: int | None = None,
    initial_context_tokens: int | None = None,
) -> LoadOptions:
    """From the options of `load` or of `plan`, which leaves out the last two.

    given_bytes: the memory that was named. Raises OptionError for a wrong value.
    """
    return LoadOptions(
        context_tokens=None if context is None else check_integer("context", context, 1, _NO_LIMIT),
        initial_context_tokens=initial_context_tokens,
        threads=None if threads is None else check_integer("threads", threads, 1, 1024),
        gpu_layers=None if gpu_layers is None else check_integer("gpu_layers", gpu_layers, 0, _NO_LIMIT),
        kv_type=check_text("kv_type", kv_type, "auto, f16, q8_0 or another type"),
        flash_attention=check_text("flash_attention", flash_attention, "auto, on or off"),
        mmap=check_boolean("mmap", mmap),
        mlock=check_boolean("mlock", mlock),
        max_branches=how.most_branches,
        memory_bytes=available_bytes() if given_bytes is None else given_bytes,
        adapter=None if adapter is None else _adapter_folder(adapter),
        exact=check_boolean("exact", exact),
    )


def _adapter_folder(adapter: str | PathLike[str]) -> str:
    """Where an adapter is; the backend knows what has to be in it. Raises OptionError where nothing is."""
    folder = Path(check_path("adapter", adapter)).expanduser()
    if not folder.is_dir():
        raise OptionError(
            f"there is no folder of an adapter at {folder}",
            "give the folder that `mlx_lm.lora --adapter-path` wrote",
        )
    return str(folder)
