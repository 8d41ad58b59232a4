"""Validate the arguments of `load` and `plan`, and convert them to planning and loading options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.planning import PlanRequest
from edgespec.assembly.worker_options import for_workers
from edgespec.backends.base import LoadOptions
from edgespec.backends.model_facts import Adapter
from edgespec.cluster.machines import Machines, parse_machines
from edgespec.errors import OptionError
from edgespec.memory import Preference, available_bytes
from edgespec.memory.context_resize import INITIAL_CONTEXT_TOKENS
from edgespec.options import MODEL_OPTIONS, as_bytes

__all__ = ["LoadRequest"]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The validated arguments of a call to `load` or `plan`."""

    target: str
    draft: str | None
    drafting: DraftingOptions
    options: LoadOptions
    plan: PlanRequest
    trust: bool
    machines: Machines | None = None

    @classmethod
    def read(cls, target: str, draft: str | None, given: Mapping[str, Any]) -> LoadRequest:
        """Create a request from the arguments of `load` or `plan`. Raise OptionError if one is invalid."""
        MODEL_OPTIONS["target"].check("target", target)
        if draft is not None:
            MODEL_OPTIONS["draft"].check("draft", draft)
        drafting = DraftingOptions.of(**given)
        if drafting.arguments["workers"] is not None:
            drafting = for_workers(drafting)
        elif drafting.arguments["split_mode"] != "layer":
            raise OptionError("--split-mode has no effect without --workers", "omit it, or add --workers")
        arguments = drafting.arguments
        options = _backend_options(drafting)
        plan = PlanRequest.from_options(
            cast(Preference, arguments["prefer"]),
            options,
            draft,
            0 if arguments["prefix_cache"] == "none" else as_bytes(arguments["prefix_cache_memory"]),
            as_bytes(arguments["headroom"]),
        )
        text = arguments["workers"]
        machines = None if text is None else parse_machines("workers", text)
        return cls(target, draft, drafting, options, plan, arguments["trust"], machines)


def _backend_options(drafting: DraftingOptions) -> LoadOptions:
    arguments = drafting.arguments
    memory_bytes = as_bytes(arguments["memory"])
    return LoadOptions(
        context_tokens=arguments["context"],
        initial_context_tokens=None if arguments["reserve_full_context"] else INITIAL_CONTEXT_TOKENS,
        threads=arguments["threads"],
        gpu_layers=arguments["gpu_layers"],
        kv_type=arguments["kv_type"],
        flash_attention=arguments["flash_attention"],
        mmap=arguments["mmap"],
        mlock=arguments["mlock"],
        max_branches=drafting.max_branches,
        memory_bytes=available_bytes() if memory_bytes is None else memory_bytes,
        adapters=tuple(Adapter(*one) for one in cast(Sequence[tuple[str, float]], arguments["adapter"])),
        exact=arguments["exact"],
        parallel=arguments["parallel"],
        split_tensors=arguments["split_mode"] == "tensor",
    )
