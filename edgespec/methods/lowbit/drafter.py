"""Create the drafter that runs the target at lower precision (on MLX) or a prepared low-bit copy of it.

The copy contains the whole model, or only the blocks that are streamed when the model does not fit in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import BackendError, MemoryBudgetError, ModelFileError
from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter, why_no_view
from edgespec.methods.constants import MAX_COPY_SHARE
from edgespec.methods.model.making import draft_with
from edgespec.model.base import LowBit
from edgespec.store.prepared_files import (
    PreparedModel,
    absolute_path,
    check_prepared,
    find_all_prepared,
    find_prepared,
    read_prepared,
)
from edgespec.store.reference import Resolved

__all__ = [
    "COPY_FILE",
    "DEFAULT_TYPE",
    "KIND",
    "SUBSTITUTES_FILE",
    "Substitutes",
    "can_save_time",
    "check_lowbit",
    "find_lowbit",
    "find_substitutes",
    "find_usable_substitutes",
    "find_useful_lowbit",
    "is_valid",
    "lowbit_file",
    "lowbit_model",
    "make",
    "preparation",
]

COPY_FILE = "copy.gguf"
# Quantisation type of low-bit copies, unless the user chooses another one.
DEFAULT_TYPE = "Q4_0"
# Identifies this kind of prepared model in the store.
KIND = "substitutes"
SUBSTITUTES_FILE = "substitutes.gguf"


def preparation(context: DrafterContext) -> str:
    """Return the command that creates the low-bit copy. Empty if none is needed, or none would save time."""
    if not context.file_format.low_bit_copy_format or find_lowbit(context.files.path) is not None:
        return ""
    # Checking takes a few seconds, so do it only if the user named the method.
    type_name = context.useful_copy_type() if "lowbit" in context.named else DEFAULT_TYPE
    if type_name is None:
        return ""
    option = "" if type_name == DEFAULT_TYPE else f" --type {type_name}"
    return f"edgespec prepare lowbit {context.reference}{option}"


def make(context: DrafterContext) -> Drafter | MissingDrafter:
    """Create the drafter, or explain why the target cannot draft at lower precision.

    Raises:
        ModelFileError: The low-bit copy is damaged or outdated.
        BackendError, MemoryBudgetError: The user named the method, but the copy cannot be
            loaded.
    """
    facts, uses_copy = context.target.facts, bool(context.file_format.low_bit_copy_format)
    if "lowbit" not in facts.capabilities.self_draft_methods:
        return why_no_view(context.target, LowBit(facts.path if uses_copy else None))
    copy, is_partial = None, False
    if uses_copy:
        found = _copy_to_use(context)
        if isinstance(found, MissingDrafter):
            return found
        copy, is_partial = str(found), context.substitutes is not None
    try:
        view = context.target.self_draft(
            LowBit(copy, context.arguments["draft_sinks"], context.window_tokens or None, is_partial)
        )
    except (BackendError, MemoryBudgetError) as error:
        # Raise only if the user named the method, because `auto` can draft with other methods.
        if "lowbit" in context.named:
            raise
        context.notices.append(f"not drafting with the low-bit copy: {error.what}")
        return MissingDrafter(error.what, error.next_step)
    return draft_with(context, view, "lowbit")


def _copy_to_use(context: DrafterContext) -> Path | MissingDrafter:
    """Return the low-bit file to draft with, or why there is none. Raises ModelFileError if it is damaged."""
    facts, path = context.target.facts, context.files.path
    if context.substitutes is not None:
        return context.substitutes
    prepared = find_lowbit(path)
    if prepared is not None:
        check_lowbit(prepared, path)
        return lowbit_file(prepared)
    command = preparation(context)
    if find_substitutes(path) is not None:
        whole = f", or `{command}` for a copy of the whole model" if command else ""
        return MissingDrafter(
            f"the low-bit copies of {facts.name}'s layers were made for a different amount of memory",
            f"run `edgespec prepare lowbit {context.reference} --for-memory SIZE` with the amount of memory"
            f" that you use{whole}",
        )
    if not command:
        return MissingDrafter(
            f"a low-bit copy of {facts.name} would not save time, because the model already uses few bits per"
            " weight",
            "use another method, such as --method suffix",
        )
    return MissingDrafter(f"there is no low-bit copy of {facts.name}", f"run `{command}` once")


def can_save_time(copy_bytes: int, source_bytes: int) -> bool:
    """Return whether drafting with a copy can save time, given the weight bytes that each model reads."""
    return copy_bytes < MAX_COPY_SHARE * source_bytes


def find_lowbit(path: Path, type_name: str | None = None) -> PreparedModel | None:
    """Find the low-bit copy of the model at `path` without checking its files.

    For a model prepared for early exit, copies of its original file are also considered. To check the files,
    use `check_lowbit`.

    Args:
        path: A GGUF file or a folder prepared for early exit.
        type_name: Quantisation type of the copy, such as `Q4_0`. If None, the newest copy of any type is
            returned.
    """
    settings = None if type_name is None else {"type": type_name}
    found = find_prepared("lowbit", path, settings)
    if found is None and path.is_dir():
        split_model = read_prepared(path)
        found = find_prepared("lowbit", split_model.source, settings)
        if found is not None and found.source_records != split_model.source_records:
            return None
    return found


def check_lowbit(prepared: PreparedModel, path: Path) -> None:
    """Check that a low-bit copy is intact and that the model at `path` has not changed.

    Raises:
        ModelFileError: The copy is damaged, or the model has changed.
    """
    check_prepared(prepared, path if prepared.source == absolute_path(path) else None)


def is_valid(prepared: PreparedModel, source: Path) -> bool:
    """Return whether a low-bit copy is intact and the model at `source` has not changed."""
    with suppress(ModelFileError):
        check_lowbit(prepared, source)
        return True
    return False


def find_useful_lowbit(path: Path) -> PreparedModel | None:
    """Return the low-bit copy of the model at `path` for automatic use.

    Returns None if the copy is missing, damaged or outdated, or if drafting with it cannot save time.
    """
    prepared = find_lowbit(path)
    if prepared is None or not is_valid(prepared, path):
        return None
    sizes = prepared.facts.get("weight_bytes", 0), prepared.facts.get("source_weight_bytes", 1)
    return prepared if can_save_time(*sizes) else None


def lowbit_file(prepared: PreparedModel) -> Path:
    """Return the path of a low-bit copy's GGUF file, as required by `LowBit(copy=...)`."""
    return prepared.path(COPY_FILE)


def lowbit_model(target: Resolved, *, is_named: bool) -> Resolved | None:
    """Return the target's low-bit copy as a model, or None if there is no copy to draft with.

    Args:
        target: The target whose copy to find.
        is_named: Whether the user named the method. If not, a copy that cannot save time is ignored.

    Raises:
        ModelFileError: The user named the method, but the copy is damaged or outdated.
    """
    form = target.file_format
    if not form.low_bit_copy_format:
        return None
    prepared = find_lowbit(target.path) if is_named else find_useful_lowbit(target.path)
    if prepared is None:
        return None
    check_lowbit(prepared, target.path)
    return replace(
        target,
        name=f"{target.name} (low-bit copy)",
        path=lowbit_file(prepared),
        format=form.low_bit_copy_format,
    )


@dataclass(frozen=True, slots=True)
class Substitutes:
    """Low-bit copies of feed-forward blocks.

    Attributes:
        file: The GGUF file with the copies, or an empty path if they have not been created yet.
        layer_bytes: Size of each layer's copy in bytes, by layer number.
    """

    file: Path
    layer_bytes: Mapping[int, int]

    def bytes_of(self, layers: Sequence[int]) -> int:
        """Return the total size of the copies for `layers`, in bytes."""
        return sum(self.layer_bytes[layer] for layer in layers)


def find_substitutes(path: Path) -> PreparedModel | None:
    """Find the newest low-bit block copies for the model at `path`, without checking their file."""
    return find_prepared(KIND, path)


def find_usable_substitutes(target: Resolved, *, is_named: bool) -> list[Substitutes]:
    """Return the sets of low-bit copies of the target's blocks, newest first.

    Each set was prepared for a certain amount of memory.

    Args:
        target: The target whose copies to find.
        is_named: Whether the user named the method. If not, damaged or outdated copies are ignored.

    Raises:
        ModelFileError: The user named the method, but the newest copies are damaged or outdated.
    """
    found: list[Substitutes] = []
    if not target.file_format.low_bit_copy_format or target.path.is_dir():
        return found
    for prepared in find_all_prepared(KIND, target.path):
        try:
            check_prepared(prepared, target.path)
        except ModelFileError:
            if is_named and not found:
                raise
            continue
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            sizes = {int(layer): int(size) for layer, size in prepared.facts["layer_bytes"].items()}
            found.append(Substitutes(prepared.path(SUBSTITUTES_FILE), sizes))
    return found
