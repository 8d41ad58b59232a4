"""The options of `edgespec.load` and `edgespec.plan`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Annotated, Literal, TypedDict

from edgespec.options.option import (
    ACCEPTANCE,
    DRAFT_LENGTH,
    MAX_LOSS,
    METHOD,
    Adapters,
    Branches,
    Choice,
    ExpertPlacement,
    Flag,
    HeadName,
    Integer,
    MethodList,
    Number,
    Option,
    PathName,
    ProjectorName,
    Size,
    Text,
    WorkerList,
    declared_options,
)

__all__ = ["LOAD_OPTIONS", "LoadArguments"]


# Minimum context size. llama.cpp and mlx-lm allocate at least this many tokens.
_MIN_CONTEXT_TOKENS = 256
# Maximum context size. No published model was trained for more than 10,485,760 tokens (Llama 4 Scout).
_MAX_CONTEXT_TOKENS = 1 << 24
# Maximum number of concurrent replies. llama.cpp supports 256 sequences, and each reply needs at least 9.
_MAX_PARALLEL = 28


class LoadArguments(TypedDict, total=False):
    """Keyword arguments of `edgespec.load` and `edgespec.plan`."""

    # fmt: off
    memory: Annotated[str | int | None, Option(Size(), "model",
        "Total memory that edgespec may use for models, caches and the program itself, such as 8GiB.",
        default_text="available memory minus --reserve", common=True,
        in_chat=("Memory limit", "for models and caches, such as 8GiB"))]
    context: Annotated[int | None, Option(Integer(_MIN_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS), "model",
        "Context length: how many tokens the model can see at once, including its own reply. From 256 to"
        " 16777216, rounded up to a multiple of 256.",
        default_text="as many tokens as the model was trained for; more than 8192 only if there is enough"
        " memory",
        common=True, in_chat=("Context length", "tokens that the model can see"))]
    prefer: Annotated[str, Option(Choice(("speed", "context")), "model",
        "What to keep if memory is tight: `speed` keeps the draft model, `context` keeps the context length.",
        default="speed")]
    headroom: Annotated[str | int | None, Option(Size(), "model",
        "Part of --memory to keep free as a safety margin.",
        default_text="5% of the planned memory, but at least 64 MiB")]
    reserve: Annotated[str | int | None, Option(Size(), "model",
        "Memory to leave free for other programs when --memory is not set.",
        default_text="512 MiB or 5% of the available memory, whichever is less")]
    parallel: Annotated[int, Option(Integer(1, _MAX_PARALLEL), "model",
        "Number of replies to generate at the same time. They share the model, but each has its own context,"
        " which takes memory.",
        default=1)]
    reserve_full_context: Annotated[bool, Option(Flag(), "model",
        "Allocate memory for the whole context when the model is loaded (8192 tokens unless --context is"
        " set), instead of allocating more as the chat grows.",
        default=False)]
    threads: Annotated[int | None, Option(Integer(1, 1024), "model",
        "Number of CPU threads to use.",
        default_text="the fastest number, or fewer if other programs are busy; 1 for tiny models")]
    gpu_layers: Annotated[int | None, Option(Integer(0), "model",
        "Number of the model's layers to run on the GPU; 0 runs the model on the CPU only.",
        default_text="as many as fit")]
    experts: Annotated[str | int, Option(ExpertPlacement(), "model",
        "Where to keep the experts of a mixture-of-experts model: `gpu`, `cpu` (main memory), or the number"
        " of layers whose experts stay in main memory. `auto` puts as many on the GPU as fit there after"
        " everything else. Only for GGUF models on a GPU.",
        default="auto", in_chat=("Experts", "auto, gpu, cpu or a number of layers"))]
    kv_type: Annotated[str, Option(Text("TYPE", "auto, f16, q8_0 or another type"), "model",
        "Data type of the KV cache, which holds the context: auto, f32, f16, bf16, q8_0, q5_1, q5_0, iq4_nl,"
        " q4_1, q4_0, or separate types for keys and values, such as q8_0/q4_0. Smaller types save memory.",
        default="auto", in_chat=("KV cache type", "auto, f16, or q8_0 to save memory"))]
    flash_attention: Annotated[str, Option(Choice(("auto", "on", "off")), "model",
        "Whether to use flash attention, which saves time and memory with long contexts.",
        default="auto")]
    mmap: Annotated[bool, Option(Flag(), "model",
        "Map the model file into memory instead of reading the whole file when the model is loaded.",
        default=True)]
    larger_than_memory: Annotated[str, Option(Choice(("auto", "no")), "model",
        "Whether to run a model that is larger than memory. `auto` runs it by reading part of it from disk"
        " for every token, which is slow. `no` stops with an error. Only for GGUF models on the CPU under"
        " Linux.",
        default="auto")]
    mlock: Annotated[bool, Option(Flag(), "model",
        "Lock the model in RAM so the system never swaps it out.",
        default=False)]
    trust: Annotated[bool, Option(Flag(), "model",
        "Load new model files without first testing them in a separate process. A damaged file could then"
        " crash edgespec.",
        default=False)]
    exactness: Annotated[str, Option(Choice(("auto", "bits", "off")), "model",
        "Whether replies must be exactly the same as without the speed-up. `bits` guarantees this. `auto`"
        " guarantees it unless replies would be more than 3% slower. `off` does not guarantee it: differences"
        " in rounding can change replies.",
        default="auto", in_chat=("Identical replies", "auto, bits (always) or off"))]
    exact: Annotated[bool, Option(Flag(), "model",
        "The same as --exactness bits.",
        default=False)]
    adapter: Annotated[str | PathLike[str] | Sequence[str | PathLike[str]] | Mapping[str, float], Option(
        Adapters(), "model",
        "LoRA adapters to apply to the model, each with an optional scale, such as `style.gguf=0.5`. GGUF"
        " models need .gguf files; MLX models need a single folder in mlx-lm format (LoRA or DoRA).",
        default=(), default_text="none", per_run=True)]
    mmproj: Annotated[str | PathLike[str] | None, Option(ProjectorName(), "model",
        "File that lets a GGUF model see images (a projector, also called mmproj). `auto` uses the one in"
        " the model's folder or in Ollama's storage; `none` turns images off and saves memory.",
        default="auto", per_run=True, in_chat=("Images", "auto, none or an mmproj file"))]
    workers: Annotated[str | None, Option(WorkerList(), "workers",
        "Machines to run the model on, each of which holds a part of it. Separate them with commas; you can"
        " add how much memory to use on each, such as ssh://you@mac=16GiB,local=8GiB. For ssh:// addresses,"
        " edgespec connects with `ssh` and starts the worker. On other machines, first start `edgespec"
        " worker` yourself.",
        per_run=True)]
    split_mode: Annotated[str, Option(Choice(("layer", "tensor")), "workers",
        "How to divide the model among the workers. `layer` gives each worker whole layers. `tensor` gives"
        " each worker a part of every layer, which is faster if the network is very fast, but works only"
        " with MLX models.",
        default="layer", per_run=True)]
    prefix_cache: Annotated[str, Option(Choice(("none", "memory", "disk")), "prefix_cache",
        "Where to cache earlier chats, so that going back to one is fast. `disk` also keeps the cache between"
        " runs, in files that only you can read.",
        default="memory")]
    prefix_cache_memory: Annotated[str | int | None, Option(Size(), "prefix_cache",
        "Maximum memory for the cache of earlier chats.",
        default_text="8 times the size of the model's KV cache, but at most 4 GiB or a quarter of the unused"
        " part of --memory, whichever is less")]
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
        "Stop drafting as soon as the draft model's probability for the next token falls below P (0 to 1).",
        default=0.0)]
    draft_branches: Annotated[tuple[int, ...] | Literal["auto"], Option(Branches(), "drafting",
        "Number of alternatives to propose for each token. For example, 3,2 proposes three for the first"
        " token and two for the second. `auto` adds alternatives only while they make replies faster.",
        default=(), default_text="none")]
    draft_window: Annotated[int | None, Option(Integer(0), "drafting",
        "Show the draft model only the last N tokens; 0 means no limit.",
        default_text="the whole text, up to the draft model's trained context")]
    draft_sinks: Annotated[int, Option(Integer(0), "drafting",
        "Number of tokens from the start of the text to keep for the draft model, in addition to the"
        " last tokens set by --draft-window.",
        default=4)]
    draft_gpu_layers: Annotated[int | None, Option(Integer(0), "drafting",
        "Number of the draft model's layers to run on the GPU.",
        default_text="the same as --gpu-layers")]
    exit_layer: Annotated[int | None, Option(Integer(1, metavar="E"), "drafting",
        "How many of the model's first layers the layerskip method uses for drafting. Only for MLX"
        " models.",
        default_text="measured when the model is loaded", per_run=True)]
    head: Annotated[str | PathLike[str] | None, Option(HeadName(), "drafting",
        "Draft head (a small network that was trained to propose tokens for this model) to use instead of a"
        " draft model. `auto` uses heads in the model's files, its folder and the Hugging Face cache (see"
        " `edgespec models show`); `none` uses no head.",
        default="auto", in_chat=("Head", "a head's name or path, auto or none"))]
    corpus: Annotated[str | PathLike[str] | None, Option(PathName(), "drafting",
        "Text file or folder that the suffix method searches for repeated text, such as the code that you"
        " are editing.")]
    remember: Annotated[bool, Option(Flag(), "drafting",
        "Save prompts and replies on this machine, in files that only you can read, so that the suffix method"
        " can use them to speed up later replies.",
        default=False)]
    learn: Annotated[bool, Option(Flag(), "drafting",
        "Between replies, train an MLX draft model on the tokens that it got wrong.",
        default=False)]
    measure_costs: Annotated[bool, Option(Flag(), "drafting",
        "When a model is loaded for the first time, spend a second or two measuring how fast it checks"
        " several tokens at once. If this is off, edgespec measures it during replies.",
        default=True)]
    # fmt: on


LOAD_OPTIONS: Mapping[str, Option] = MappingProxyType(declared_options(LoadArguments))
"""The options of `load` and `plan`, excluding the target, the draft model and `progress`."""
