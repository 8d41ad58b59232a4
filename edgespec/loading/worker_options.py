"""Check and change the options of `load` for a target whose layers are on workers (`--workers`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import Machines, SshAddress
from edgespec.errors import OptionError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pairing import ModelPair
from edgespec.loading.worker_speed import output_is_faster_on_worker
from edgespec.model.base import LoadOptions, Progress
from edgespec.model.registry import FileFormat
from edgespec.options.methods import head_names, methods
from edgespec.options.settings import LOAD_OPTIONS, LoadArguments

__all__ = ["connect_workers", "for_workers"]

# Options that are rejected with `--workers`, because they have no effect or are not implemented there.
_UNSUPPORTED = (
    "parallel", "gpu_layers", "exact", "adapter", "learn", "draft_branches", "exit_layer", "mlock",
)  # fmt: skip


def for_workers(drafting: DraftingOptions) -> DraftingOptions:
    """Return the drafting options for a target on workers, with the prefix cache disabled.

    Heads are used only if the user selected their method.

    Raises:
        OptionError: The user chose an option or method that does not work with workers.
    """
    arguments = drafting.arguments
    for name in _UNSUPPORTED:
        if arguments[name] != LOAD_OPTIONS[name].default:  # type: ignore[literal-required]
            dashed = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{dashed} does not work with --workers yet",
                f"omit {dashed}",
                option=name,
                code="option_not_supported",
            )
    if arguments["exactness"] == "bits":
        raise OptionError(
            "--exactness bits does not work with --workers yet",
            "omit it",
            option="exactness",
            code="option_not_supported",
        )
    supported = [each.name for each in methods() if each.works_on_workers]
    unsupported = drafting.named_drafters.difference(supported)
    if unsupported:
        raise OptionError(
            f"method {min(unsupported)!r} does not work with --workers yet",
            f"use {', '.join(supported)}, auto or none",
            option="method",
            code="option_not_supported",
        )
    # Reading hidden states slows down every pass on workers, so `auto` could not stay within `--max-loss`.
    uses_head = not drafting.named_drafters.isdisjoint(head_names())
    if drafting.names_head and not uses_head:
        raise OptionError(
            f"--head {drafting.head} would slow down all passes on workers, also those without drafts, so "
            "the method auto does not use it",
            "select the head's method, such as --method eagle, or omit --head",
            option="head",
            code="option_not_supported",
        )
    head = drafting.head if uses_head else "none"
    changed = cast(LoadArguments, {**arguments, "head": head, "prefix_cache": "none"})
    return replace(drafting, arguments=changed)


def connect_workers(
    machines: Machines | None,
    pair: ModelPair,
    options: LoadOptions,
    undo: ExitStack,
    progress: Progress | None = None,
) -> LoadOptions:
    """Reserve the workers until `undo` is closed, and return the load options with them.

    Also decides which machine computes the output layer.

    Raises:
        CancelledError: `progress` returned False.
        OptionError: The target does not support workers, or this machine cannot hold layers.
        WorkerError, MemoryBudgetError: A worker cannot be used.
    """
    if machines is None:
        return options
    form = pair.target.file_format
    if form.worker_library is None:
        raise OptionError(
            f"{pair.target.name} cannot run on workers, because its format is {form.label}",
            "use an ordinary GGUF or MLX version of the model, or omit --workers",
            option="workers",
            code="option_not_supported",
        )
    if options.split_tensors:
        _check_tensor_split(machines, pair.target.name, form)
    if machines.local_bytes and pair.target.backend.graphics_cards():
        raise OptionError(
            "--workers does not support local=SIZE on a machine with a graphics card yet",
            "start `edgespec worker` on this machine too, and name 127.0.0.1:50052 instead of local",
            option="workers",
            code="option_not_supported",
        )
    workers = ConnectedWorkers(machines, form.worker_library(), progress)
    undo.callback(workers.close)
    # Heads read hidden states and the output layer's weights on this machine.
    on_worker = not pair.heads and output_is_faster_on_worker(pair.target, workers)
    return replace(options, workers=workers, output_on_worker=on_worker)


def _check_tensor_split(machines: Machines, name: str, form: FileFormat) -> None:
    if not form.splits_tensors:
        reason = f"works only with MLX models, but the format of {name} is {form.label}"
        next_step = "use an MLX version of it"
    elif len(machines.workers) < 2:
        reason, next_step = "needs at least two workers", "name more workers"
    elif machines.local_bytes:
        reason, next_step = (
            "does not support local=SIZE",
            "start `edgespec worker` on this machine too, and name its address instead of local",
        )
    elif ssh := next((each for each in machines.workers if isinstance(each, SshAddress)), None):
        reason, next_step = (
            f"does not support {ssh}, because the workers must reach each other",
            "start the workers with --listen and --i-trust-this-network",
        )
    else:
        return
    raise OptionError(
        f"--split-mode tensor {reason}",
        f"{next_step}, or use --split-mode layer",
        option="split_mode",
        code="option_not_supported",
    )
