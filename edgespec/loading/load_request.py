"""Validate the arguments of `load` and `plan`, and convert them to planning and loading options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, cast

from edgespec.cluster.machines import Machines, parse_machines
from edgespec.errors import OptionError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.planning import PlanRequest, fixed_options
from edgespec.loading.workers import for_workers
from edgespec.memory.budget import available_bytes
from edgespec.memory.constants import INITIAL_CONTEXT_TOKENS
from edgespec.memory.fitting import Preference
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import Adapter
from edgespec.options.default_model import default_model
from edgespec.options.settings import MODEL_OPTIONS, as_bytes

# More layers than any model has.
_ALL_LAYERS = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The validated arguments of a call to `load` or `plan`."""

    target: str
    draft: str | None
    drafting: DraftingOptions
    options: LoadOptions
    plan: PlanRequest
    trust: bool
    projector: str = "auto"
    machines: Machines | None = None

    @classmethod
    def read(
        cls,
        target: str | PathLike[str] | None,
        draft: str | PathLike[str] | None,
        given: Mapping[str, Any],
    ) -> LoadRequest:
        """Create a request from the arguments of `load` or `plan`. Raises OptionError if one is invalid."""
        if target is None:
            target = default_model()
        target_name: str = MODEL_OPTIONS["target"].check("target", target)
        draft_name: str | None = None if draft is None else MODEL_OPTIONS["draft"].check("draft", draft)
        drafting = DraftingOptions.of(**given)
        if drafting.arguments["workers"] is not None:
            drafting = for_workers(drafting)
        elif drafting.arguments["split_mode"] != "layer":
            raise OptionError(
                "--split-mode has no effect without --workers",
                "omit it, or add --workers",
                option="split_mode",
                code="option_without_effect",
            )
        arguments = drafting.arguments
        options = _backend_options(drafting)
        plan = PlanRequest(
            fixed_options(options, draft_name),
            cast(Preference, arguments["prefer"]),
            0 if arguments["prefix_cache"] == "none" else as_bytes(arguments["prefix_cache_memory"]),
            as_bytes(arguments["headroom"]),
            may_drop_projector=arguments["mmproj"] == "auto",
        )
        text = arguments["workers"]
        machines = None if text is None else parse_machines("workers", text)
        return cls(
            target_name,
            draft_name,
            drafting,
            options,
            plan,
            arguments["trust"],
            cast(str, arguments["mmproj"]),
            machines,
        )


def _layers_with_experts_in_memory(experts: str | int) -> int | None:
    """Convert an `--experts` value to `LoadOptions.experts`."""
    if isinstance(experts, int):
        return experts
    return {"auto": None, "gpu": 0}.get(experts, _ALL_LAYERS)


def _backend_options(drafting: DraftingOptions) -> LoadOptions:
    arguments = drafting.arguments
    memory_bytes = as_bytes(arguments["memory"])
    return LoadOptions(
        context_tokens=arguments["context"],
        initial_context_tokens=None if arguments["reserve_full_context"] else INITIAL_CONTEXT_TOKENS,
        threads=arguments["threads"],
        gpu_layers=arguments["gpu_layers"],
        experts=_layers_with_experts_in_memory(arguments["experts"]),
        kv_type=arguments["kv_type"],
        flash_attention=arguments["flash_attention"],
        mmap=arguments["mmap"],
        mlock=arguments["mlock"],
        max_branches=drafting.max_branches,
        memory_bytes=available_bytes() if memory_bytes is None else memory_bytes,
        adapters=tuple(Adapter(*one) for one in cast(Sequence[tuple[str, float]], arguments["adapter"])),
        exact=arguments["exactness"] != "off",
        parallel=arguments["parallel"],
        split_tensors=arguments["split_mode"] == "tensor",
    )
