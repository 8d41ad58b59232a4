"""The options of `edgespec.load` and `edgespec.plan`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Annotated, Literal, TypedDict

from edgespec.option import ACCEPTANCE, DRAFT_LENGTH, METHOD, Option, declared_options
from edgespec.option_kinds import (
    Branches,
    Choice,
    Flag,
    Integer,
    MethodList,
    Number,
    PathName,
    Share,
    Size,
    Text,
)

__all__ = ["LOAD_OPTIONS", "LoadArguments"]


class LoadArguments(TypedDict, total=False):
    """Keyword arguments of `edgespec.load` and `edgespec.plan`."""

    # fmt: off
    memory: Annotated[str | int | None, Option(Size(), "model",
        "Memory that edgespec may use in total, such as 8GiB: models, caches, working memory and the program"
        " itself.",
        default_text="what is available", common=True)]
    context: Annotated[int | None, Option(Integer(1), "model",
        "Context length in tokens: how much of the chat the model can read, with the reply.",
        default_text="what the model was trained for; beyond 8192 only if nothing else has to shrink",
        common=True)]
    prefer: Annotated[str, Option(Choice(("speed", "context")), "model",
        "What to keep if memory is short. speed: the draft model. context: the context length.",
        default="speed")]
    headroom: Annotated[str | int | None, Option(Size(), "model",
        "Part of --memory to keep free for unforeseen needs.",
        default_text="5 % of the plan, at least 64 MiB")]
    reserve: Annotated[str | int | None, Option(Size(), "model",
        "Memory to leave free for other programs, if --memory is not given.",
        default_text="512 MiB, or 5 % of what is available if less")]
    reserve_full_context: Annotated[bool, Option(Flag(), "model",
        "Reserve the memory for the whole context when loading, for 8192 tokens unless --context is given."
        " Otherwise, memory use grows with the chat.",
        default=False)]
    threads: Annotated[int | None, Option(Integer(1, 1024), "model",
        "Number of CPU threads to use.",
        default_text="one per core; one for a tiny model")]
    gpu_layers: Annotated[int | None, Option(Integer(0), "model",
        "Number of model layers to run on the GPU.",
        default_text="all")]
    kv_type: Annotated[str, Option(Text("TYPE", "auto, f16, q8_0 or another type"), "model",
        "Number format of the context's cache. Smaller formats save memory: auto, f32, f16, bf16, q8_0, q5_1,"
        " q5_0, iq4_nl, q4_1, q4_0, or two of them, as keys/values.",
        default="auto")]
    flash_attention: Annotated[str, Option(Choice(("auto", "on", "off")), "model",
        "Whether to use flash attention, which saves time and memory in long contexts.",
        default="auto")]
    mmap: Annotated[bool, Option(Flag(), "model",
        "Map the model file into memory. Otherwise, the whole file is read when loading.",
        default=True)]
    mlock: Annotated[bool, Option(Flag(), "model",
        "Lock the model in RAM, so that the system never swaps it out.",
        default=False)]
    exact: Annotated[bool, Option(Flag(), "model",
        "Use only computations whose results equal plain decoding to the last bit. edgespec finds out which"
        " ones they are when a model is first loaded. The speed-up may be smaller.",
        default=False)]
    adapter: Annotated[str | PathLike[str] | None, Option(PathName(), "model",
        "Folder of a LoRA or DoRA adapter for the model, in the format of mlx-lm. MLX models only.",
        per_run=True)]
    prefix_cache: Annotated[str, Option(Choice(("none", "memory", "disk")), "prefix_cache",
        "Where to cache earlier chats, so that returning to one is fast. disk also keeps them for later runs,"
        " readable only by you.",
        default="memory")]
    prefix_cache_memory: Annotated[str | int | None, Option(Size(), "prefix_cache",
        "Maximum size of this cache in memory.",
        default_text="a quarter of what --memory leaves, up to 4 GiB")]
    prefix_cache_disk: Annotated[str | int | None, Option(Size(), "prefix_cache",
        "Maximum size of this cache on disk.",
        default_text="4 GiB, or a tenth of the free disk space if that is less")]
    method: Annotated[str, METHOD]
    methods: Annotated[Sequence[str], Option(MethodList(), "method",
        "Methods that replies may use in addition to `method`. Everything that they need is loaded too.",
        default=(), api_only=True)]
    draft_length: Annotated[int | None, DRAFT_LENGTH]
    acceptance: Annotated[str, ACCEPTANCE]
    max_loss: Annotated[float | None, Option(Share(), "drafting",
        "Maximum slowdown of a reply that drafting may cause, as a share of the reply's time, plus the time"
        " of two tokens. If set, it also applies to methods other than auto.",
        default_text="2% for auto, no limit for other methods")]
    draft_confidence: Annotated[float, Option(Number(0.0, 1.0, below_high=True, metavar="P"), "drafting",
        "Stop drafting when the draft model is less certain than this, from 0 to 1.",
        default=0.0, read_by=("model", "layerskip", "lowbit", "swift"))]
    draft_branches: Annotated[tuple[int, ...] | Literal["auto"], Option(Branches(), "drafting",
        "Number of alternatives to draft for each next token, such as 3,2 for the first two. auto: as many as"
        " make replies faster.",
        default=(), default_text="none", read_by=("model", "layerskip", "lowbit"))]
    draft_window: Annotated[int | None, Option(Integer(0), "drafting",
        "Let the draft model read only the last N tokens; 0 means all.",
        default_text="the whole text, up to the length the draft model was trained for",
        read_by=("model", "lowbit"))]
    draft_sinks: Annotated[int, Option(Integer(0), "drafting",
        "Number of tokens at the start of the text that the draft model reads besides those of"
        " --draft-window.",
        default=4, read_by=("model", "lowbit"))]
    exit_layer: Annotated[int | None, Option(Integer(1, metavar="E"), "drafting",
        "Number of layers that method layerskip uses to draft. MLX models only.",
        default_text="measured when the model is loaded", read_by=("layerskip",), per_run=True)]
    corpus: Annotated[str | PathLike[str] | None, Option(PathName(), "drafting",
        "Text file or folder in which method suffix looks up likely continuations, such as the code that you"
        " are editing.",
        read_by=("suffix",))]
    remember: Annotated[bool, Option(Flag(), "drafting",
        "Save prompts and replies on this machine, readable only by you, so that method suffix can draft from"
        " them later.",
        default=False)]
    learn: Annotated[bool, Option(Flag(), "drafting",
        "Train an MLX draft model between replies, on tokens that it predicted wrongly.",
        default=False, read_by=("model",))]
    measure_costs: Annotated[bool, Option(Flag(), "drafting",
        "When a model is first loaded, measure for a second or two how fast it checks several tokens at once."
        " Otherwise, this is measured during replies.",
        default=True)]
    # fmt: on


LOAD_OPTIONS: Mapping[str, Option] = MappingProxyType(declared_options(LoadArguments))
"""The options of `load` and `plan`, besides the target, the draft model and `progress`."""
