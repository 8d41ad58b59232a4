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

    memory: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="model",
            default_text="what is available",
            help="Memory that edgespec may use in total, such as 8GiB: model weights, caches, working memory"
            " and the program itself.",
        ),
    ]
    headroom: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="model",
            default_text="5 % of the plan, at least 64 MiB",
            help="Memory to leave free for allocations that the plan does not include.",
        ),
    ]
    reserve: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="model",
            default_text="512 MiB, or 5 % of what is available if less",
            help="Memory to leave free for other programs.",
        ),
    ]
    prefer: Annotated[
        str,
        Option(
            kind=Choice(("speed", "context")),
            group="model",
            default="speed",
            help="What to keep if memory is short. speed: the draft model. context: the context length.",
        ),
    ]
    context: Annotated[
        int | None,
        Option(
            kind=Integer(1),
            group="model",
            default_text="what the model was trained for; beyond 8192 only if nothing else has to shrink",
            help="Context length in tokens: prompt and reply together.",
        ),
    ]
    reserve_full_context: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="model",
            default=False,
            help="Reserve memory for the whole context when loading, for 8192 tokens unless --context is"
            " given. Otherwise, caches grow with the chat.",
        ),
    ]
    threads: Annotated[
        int | None,
        Option(
            kind=Integer(1, 1024),
            group="model",
            default_text="one per core; one for a tiny model",
            help="CPU threads to use.",
        ),
    ]
    gpu_layers: Annotated[
        int | None,
        Option(
            kind=Integer(0),
            group="model",
            default_text="all",
            help="Number of model layers to run on the GPU.",
        ),
    ]
    kv_type: Annotated[
        str,
        Option(
            kind=Text("TYPE", "auto, f16, q8_0 or another type"),
            group="model",
            default="auto",
            help="Data type of the KV cache: auto, f32, f16, bf16, q8_0, q5_1, q5_0, iq4_nl, q4_1, q4_0,"
            " or two of them, as keys/values.",
        ),
    ]
    flash_attention: Annotated[
        str,
        Option(
            kind=Choice(("auto", "on", "off")),
            group="model",
            default="auto",
            help="Whether to use fused attention kernels.",
        ),
    ]
    mmap: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="model",
            default=True,
            help="Map the model file into memory. Otherwise, the whole file is read when loading.",
        ),
    ]
    mlock: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="model",
            default=False,
            help="Lock the model in RAM, so that the system never swaps it out.",
        ),
    ]
    exact: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="model",
            default=False,
            help="Use only computations that are bit-identical to plain decoding. edgespec determines"
            " them when a model is first loaded. Drafting may be slower.",
        ),
    ]
    adapter: Annotated[
        str | PathLike[str] | None,
        Option(
            kind=PathName(),
            group="model",
            per_run=True,
            help="Folder of a LoRA or DoRA adapter for the model, in the format of mlx-lm. MLX models only.",
        ),
    ]
    prefix_cache: Annotated[
        str,
        Option(
            kind=Choice(("none", "memory", "disk")),
            group="prefix_cache",
            default="memory",
            help="Where to cache earlier chats, so that returning to one is fast. disk also keeps them for"
            " later runs, readable only by you.",
        ),
    ]
    prefix_cache_memory: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="prefix_cache",
            default_text="a quarter of what --memory leaves, up to 4 GiB",
            help="Maximum size of the prefix cache in memory.",
        ),
    ]
    prefix_cache_disk: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="prefix_cache",
            default_text="4 GiB, or a tenth of the free disk space if that is less",
            help="Maximum size of the prefix cache on disk.",
        ),
    ]
    draft_branches: Annotated[
        tuple[int, ...] | Literal["auto"],
        Option(
            kind=Branches(),
            group="drafting",
            default=(),
            default_text="none",
            read_by=("model", "layerskip", "lowbit"),
            help="Number of alternatives to draft for each next token, such as 3,2 for the first two. auto:"
            " as many as make replies faster.",
        ),
    ]
    draft_confidence: Annotated[
        float,
        Option(
            kind=Number(0.0, 1.0, below_high=True, metavar="P"),
            group="drafting",
            default=0.0,
            read_by=("model", "layerskip", "lowbit", "swift"),
            help="Stop drafting when the draft model is less certain than this.",
        ),
    ]
    draft_window: Annotated[
        int | None,
        Option(
            kind=Integer(0),
            group="drafting",
            default_text="the whole text, up to the length the draft model was trained for",
            read_by=("model", "lowbit"),
            help="Let the draft model read only the last N tokens; 0 means all.",
        ),
    ]
    draft_sinks: Annotated[
        int,
        Option(
            kind=Integer(0),
            group="drafting",
            default=4,
            read_by=("model", "lowbit"),
            help="Number of tokens at the start of the text that the draft model reads in addition to its"
            " window.",
        ),
    ]
    exit_layer: Annotated[
        int | None,
        Option(
            kind=Integer(1, metavar="E"),
            group="drafting",
            default_text="measured when the model is loaded",
            read_by=("layerskip",),
            per_run=True,
            help="Number of layers that method layerskip uses to draft. MLX models only.",
        ),
    ]
    corpus: Annotated[
        str | PathLike[str] | None,
        Option(
            kind=PathName(),
            group="drafting",
            read_by=("suffix",),
            help="Text file or folder in which method suffix looks up likely continuations, such as the"
            " code you are editing.",
        ),
    ]
    remember: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="drafting",
            default=False,
            help="Save prompts and replies on this machine, readable only by you, so that method suffix can"
            " draft from them later.",
        ),
    ]
    learn: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="drafting",
            default=False,
            read_by=("model",),
            help="Train an MLX draft model between replies, on tokens that it predicted wrongly.",
        ),
    ]
    max_loss: Annotated[
        float | None,
        Option(
            kind=Share(),
            group="drafting",
            default_text="2% for auto, no limit for named drafters",
            help="Maximum slowdown of a reply that drafting may cause, as a share of the reply's time, plus"
            " the time of two tokens. If set, it also applies to named drafters.",
        ),
    ]
    measure_costs: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="drafting",
            default=True,
            help="When a model is first loaded, measure for a second or two how fast it checks several"
            " tokens at once. Otherwise, this is measured during replies.",
        ),
    ]
    method: Annotated[str, METHOD]
    methods: Annotated[
        Sequence[str],
        Option(
            kind=MethodList(),
            group="method",
            default=(),
            api_only=True,
            help="Methods that replies may use in addition to `method`. Everything that they need is loaded"
            " too.",
        ),
    ]
    draft_length: Annotated[int | None, DRAFT_LENGTH]
    acceptance: Annotated[str, ACCEPTANCE]


LOAD_OPTIONS: Mapping[str, Option] = MappingProxyType(declared_options(LoadArguments))
"""The options of `load` and `plan`, besides the target, the draft model and `progress`."""
