"""The options of `edgespec.load` and `edgespec.plan`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Annotated, Literal, TypedDict

from edgespec.options.option import ACCEPTANCE, DRAFT_LENGTH, MAX_LOSS, METHOD, Option, declared_options
from edgespec.options.option_kinds import (
    Adapters,
    Branches,
    Choice,
    Flag,
    HeadName,
    Integer,
    MethodList,
    Number,
    PathName,
    ProjectorName,
    Size,
    Text,
    WorkerList,
)

__all__ = ["LOAD_OPTIONS", "LoadArguments"]


# Minimum context size. llama.cpp and mlx-lm allocate at least this many tokens.
_MIN_CONTEXT_TOKENS = 256
# Maximum context size. No published model was trained for more than 10,485,760 tokens (Llama 4 Scout).
_MAX_CONTEXT_TOKENS = 1 << 24
# Maximum number of concurrent replies. llama.cpp has 256 sequences, and each reply needs at least 9.
_MAX_PARALLEL = 28


class LoadArguments(TypedDict, total=False):
    """Keyword arguments of `edgespec.load` and `edgespec.plan`."""

    # fmt: off
    memory: Annotated[str | int | None, Option(Size(), "model",
        "Total memory edgespec may use, such as 8GiB, including models, caches, working memory and the"
        " program itself.",
        default_text="available memory minus --reserve", common=True,
        in_chat=("Memory limit", "for models and caches, such as 8GiB"))]
    context: Annotated[int | None, Option(Integer(_MIN_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS), "model",
        "Context length in tokens, including the reply: 256 to 16777216, rounded up to a multiple of 256.",
        default_text="the model's trained context; above 8192 only if nothing else has to shrink",
        common=True, in_chat=("Context length", "tokens that the model can see"))]
    prefer: Annotated[str, Option(Choice(("speed", "context")), "model",
        "What to keep when memory is tight: `speed` keeps the draft model, `context` keeps the context"
        " length.",
        default="speed")]
    headroom: Annotated[str | int | None, Option(Size(), "model",
        "Portion of --memory to hold back as a safety margin.",
        default_text="5% of the planned memory, but at least 64 MiB")]
    reserve: Annotated[str | int | None, Option(Size(), "model",
        "Memory to leave free for other programs when --memory is not set.",
        default_text="512 MiB or 5% of the available memory, whichever is less")]
    parallel: Annotated[int, Option(Integer(1, _MAX_PARALLEL), "model",
        "Number of replies to generate at once. They share the model's weights and computations, and each has"
        " a context of its own, so memory for several contexts is allocated.",
        default=1)]
    reserve_full_context: Annotated[bool, Option(Flag(), "model",
        "Allocate memory for the full context at load time (8192 tokens unless --context is set) instead of"
        " growing it with the chat.",
        default=False)]
    threads: Annotated[int | None, Option(Integer(1, 1024), "model",
        "Number of CPU threads to use.",
        default_text="fastest number, within the cores that other programs leave free; 1 for tiny models")]
    gpu_layers: Annotated[int | None, Option(Integer(0), "model",
        "Number of model layers to offload to the GPU; 0 uses only the CPU.",
        default_text="as many as fit")]
    kv_type: Annotated[str, Option(Text("TYPE", "auto, f16, q8_0 or another type"), "model",
        "Data type of the KV cache: auto, f32, f16, bf16, q8_0, q5_1, q5_0, iq4_nl, q4_1, q4_0, or separate"
        " types for keys and values, such as q8_0/q4_0. Smaller types save memory.",
        default="auto", in_chat=("KV cache type", "auto, f16, or to save memory: q8_0"))]
    flash_attention: Annotated[str, Option(Choice(("auto", "on", "off")), "model",
        "Whether to use flash attention, which saves time and memory with long contexts.",
        default="auto")]
    mmap: Annotated[bool, Option(Flag(), "model",
        "Memory-map the model file instead of reading all of it at load time.",
        default=True)]
    larger_than_memory: Annotated[str, Option(Choice(("auto", "no")), "model",
        "Whether to run a model that does not fit in memory. `auto` reads part of its weights from disk in"
        " every pass, which is slow, but drafting saves most of these passes. `no` refuses. GGUF models on a"
        " Linux CPU only.",
        default="auto")]
    mlock: Annotated[bool, Option(Flag(), "model",
        "Lock the model in RAM so the system never swaps it out.",
        default=False)]
    trust: Annotated[bool, Option(Flag(), "model",
        "Load new model files without first trying them in a separate process. A damaged file could then make"
        " edgespec crash.",
        default=False)]
    exactness: Annotated[str, Option(Choice(("auto", "bits", "off")), "model",
        "Whether replies must be identical to plain decoding. `auto` uses only passes that agree bit for bit,"
        " which edgespec finds when it first loads a model, unless that would be slower by more than 3%."
        " `bits` always does. `off` never does, so rounding can change replies.",
        default="auto")]
    exact: Annotated[bool, Option(Flag(), "model",
        "Short form of --exactness bits.",
        default=False)]
    adapter: Annotated[str | PathLike[str] | Sequence[str | PathLike[str]] | Mapping[str, float], Option(
        Adapters(), "model",
        "LoRA adapters to apply to the model, each with an optional scale, such as `style.gguf=0.5`. GGUF"
        " models need .gguf files, MLX models a single folder in mlx-lm format (LoRA or DoRA).",
        default=(), default_text="none", per_run=True)]
    mmproj: Annotated[str | PathLike[str] | None, Option(ProjectorName(), "model",
        "Projector, with which a GGUF model sees images: an mmproj file. `auto` uses the one in the model's"
        " folder or Ollama's store; `none` saves its memory.",
        default="auto", per_run=True)]
    workers: Annotated[str | None, Option(WorkerList(), "workers",
        "Machines that hold the model's layers, each with an optional amount of memory, such as"
        " ssh://you@mac=16GiB,192.168.1.20:50052,local=8GiB. For ssh:// addresses, edgespec connects with"
        " `ssh` and starts the worker. Start `edgespec worker` yourself on the others.",
        per_run=True)]
    split_mode: Annotated[str, Option(Choice(("layer", "tensor")), "workers",
        "How to divide the model among the workers. `layer` gives each worker whole layers. `tensor` gives"
        " each one a part of every layer, which is faster in very fast networks. MLX models only.",
        default="layer", per_run=True)]
    prefix_cache: Annotated[str, Option(Choice(("none", "memory", "disk")), "prefix_cache",
        "Where to cache earlier chats so that returning to one is fast. `disk` also keeps the cache between"
        " runs, in files only you can read.",
        default="memory")]
    prefix_cache_memory: Annotated[str | int | None, Option(Size(), "prefix_cache",
        "Maximum memory for the cache of earlier chats.",
        default_text="8 times the model's KV cache, but at most 4 GiB and a quarter of the memory left within"
        " --memory")]
    prefix_cache_disk: Annotated[str | int | None, Option(Size(), "prefix_cache",
        "Maximum disk space for the cache of earlier chats.",
        default_text="4 GiB or 10% of the free disk space, whichever is less")]
    method: Annotated[str, METHOD]
    methods: Annotated[Sequence[str], Option(MethodList(), "method",
        "Methods to load in addition to `method`, so that individual replies can use them.",
        default=(), api_only=True)]
    draft_length: Annotated[int | None, DRAFT_LENGTH]
    acceptance: Annotated[str, ACCEPTANCE]
    max_loss: Annotated[float | None, MAX_LOSS]
    draft_confidence: Annotated[float, Option(Number(0.0, 1.0, below_high=True, metavar="P"), "drafting",
        "Stop drafting when the draft model's confidence falls below P (0 to 1).",
        default=0.0)]
    draft_branches: Annotated[tuple[int, ...] | Literal["auto"], Option(Branches(), "drafting",
        "Number of alternatives to draft at each position. For example, 3,2 drafts three for the first token"
        " and two for the second. `auto` adds alternatives as long as they make replies faster.",
        default=(), default_text="none")]
    draft_window: Annotated[int | None, Option(Integer(0), "drafting",
        "Limit the draft model's context to the last N tokens; 0 means no limit.",
        default_text="the whole text, up to the draft model's trained context")]
    draft_sinks: Annotated[int, Option(Integer(0), "drafting",
        "Number of tokens to keep from the start of the text, in addition to those in --draft-window.",
        default=4)]
    draft_gpu_layers: Annotated[int | None, Option(Integer(0), "drafting",
        "Number of the draft model's layers to offload to the GPU.",
        default_text="as for --gpu-layers")]
    exit_layer: Annotated[int | None, Option(Integer(1, metavar="E"), "drafting",
        "Number of layers the layerskip method drafts with. MLX models only.",
        default_text="measured at load time", per_run=True)]
    head: Annotated[str | PathLike[str] | None, Option(HeadName(), "drafting",
        "Head to draft with: a small network trained for this model. `auto` uses heads in the model's"
        " files, its folder and the Hugging Face cache (see `edgespec models show`); `none` disables heads.",
        default="auto", in_chat=("Head", "a head's name or path, auto or none"))]
    corpus: Annotated[str | PathLike[str] | None, Option(PathName(), "drafting",
        "Text file or folder where the suffix method looks up likely continuations, such as the code you are"
        " editing.")]
    remember: Annotated[bool, Option(Flag(), "drafting",
        "Save prompts and replies on this machine, in files only you can read, so the suffix method can draft"
        " from them later.",
        default=False)]
    learn: Annotated[bool, Option(Flag(), "drafting",
        "Between replies, train an MLX draft model on the tokens it predicted wrongly.",
        default=False)]
    measure_costs: Annotated[bool, Option(Flag(), "drafting",
        "When loading a model for the first time, spend a second or two measuring how fast it verifies"
        " several tokens at once. If disabled, edgespec measures this during replies.",
        default=True)]
    # fmt: on


LOAD_OPTIONS: Mapping[str, Option] = MappingProxyType(declared_options(LoadArguments))
"""The options of `load` and `plan`, besides the target, the draft model and `progress`."""
