"""Every option of `load`, `plan` and a reply, declared once.

The keyword arguments of the Python API, the options of the command line, the keys of the settings file, the
EDGESPEC_ variables and the table in the documentation all derive from the declarations in this module.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os import PathLike
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast, get_type_hints

from edgespec.engine.sampling_params import SamplingParams
from edgespec.errors import OptionError
from edgespec.method_names import parse_method
from edgespec.option_kinds import (
    Branches,
    Choice,
    Flag,
    Integer,
    Kind,
    MethodList,
    MethodName,
    ModelName,
    Number,
    PathName,
    SamplingNumber,
    Share,
    Size,
    Text,
    TextList,
    TokenBiases,
)

__all__ = [
    "ACCEPTANCES",
    "LOAD_OPTIONS",
    "MAX_DRAFT_LENGTH",
    "MODEL_OPTIONS",
    "REPLY_OPTIONS",
    "SETTINGS",
    "Group",
    "LoadArguments",
    "Option",
    "ReplyArguments",
    "check_load_arguments",
    "check_names",
    "documentation",
    "options_table",
    "unread_options",
]

ACCEPTANCES = ("invariant", "rejection")
MAX_DRAFT_LENGTH = 64
_MAX_SEED = (1 << 63) - 1

Group: TypeAlias = Literal["model", "prefix_cache", "drafting", "method", "sampling", "reply"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option.

    Attributes:
        kind: How its value is read from text and checked.
        help: One or two sentences for `--help` and the documentation.
        group: The heading under which it is listed.
        default: The value that holds where none is given.
        default_text: The default in words, where the value itself does not say it.
        flags: Short forms on the command line, such as `-n`.
        read_by: The drafters that read it. Given for a method without one of them, it is refused. Empty
            where every method reads it.
        per_run: Whether it belongs to one model or one run, so that no setting for all runs is offered.
        api_only: Whether only Python code can give it.
    """

    kind: Kind
    help: str
    group: Group
    default: Any = None
    default_text: str = ""
    flags: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    per_run: bool = False
    api_only: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return a value in its usual form. Raises OptionError."""
        return self.default if value is None and self.default is None else self.kind.check(name, value)


_METHOD = Option(
    kind=MethodName(),
    group="method",
    default="auto",
    help="How tokens are drafted. auto: with the draft model and earlier text, while that makes replies"
    " faster. none: not at all. Otherwise drafters joined by +, used whatever the speed: model, layerskip,"
    " lowbit, swift, lookahead, suffix, ngram.",
)
_DRAFT_LENGTH = Option(
    kind=Integer(1, MAX_DRAFT_LENGTH, metavar="K", hint=", or method none"),
    group="method",
    default_text="4; with auto up to 16, as the speed allows",
    help=f"Tokens to draft ahead, 1 to {MAX_DRAFT_LENGTH}. With auto the most it may draft.",
)
_ACCEPTANCE = Option(
    kind=Choice(ACCEPTANCES),
    group="method",
    default="invariant",
    help="invariant: a seed gives the same reply with every method. rejection: only the distribution of"
    " replies is the same; a seed repeats a reply with one named drafter, but not with auto, which measures"
    " time.",
)


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
            help="Memory to leave for what the plan does not model.",
        ),
    ]
    reserve: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="model",
            default_text="512 MiB, or 5 % of what is available if less",
            help="Memory to leave to other programs.",
        ),
    ]
    prefer: Annotated[
        str,
        Option(
            kind=Choice(("speed", "context")),
            group="model",
            default="speed",
            help="What to keep when memory is short. speed: the draft model. context: long chats.",
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
            help="Reserve memory for the whole context at the start, for 8192 tokens unless --context is"
            " given. Otherwise caches grow with the chat.",
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
        Option(kind=Integer(0), group="model", default_text="all", help="Model layers to put on the GPU."),
    ]
    kv_type: Annotated[
        str,
        Option(
            kind=Text("TYPE", "auto, f16, q8_0 or another type"),
            group="model",
            default="auto",
            help="Number format of the KV cache: auto, f32, f16, bf16, q8_0, q5_1, q5_0, iq4_nl, q4_1, q4_0,"
            " or two of them as keys/values.",
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
            help="Map the model file into memory. Otherwise the whole file is read at the start.",
        ),
    ]
    mlock: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="model",
            default=False,
            help="Keep the model in RAM, so that the system never swaps it out.",
        ),
    ]
    exact: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="model",
            default=False,
            help="Use only computations whose results equal plain decoding to the last bit. They are"
            " determined when a model is first loaded. Drafting may be slower.",
        ),
    ]
    adapter: Annotated[
        str | PathLike[str] | None,
        Option(
            kind=PathName(),
            group="model",
            per_run=True,
            help="Folder of a LoRA or DoRA adapter for the model, as mlx-lm writes it. MLX models only.",
        ),
    ]
    prefix_cache: Annotated[
        str,
        Option(
            kind=Choice(("none", "memory", "disk")),
            group="prefix_cache",
            default="memory",
            help="Where to cache earlier chats, so that going back to one is fast. disk also keeps them for"
            " later runs, readable by you only.",
        ),
    ]
    prefix_cache_memory: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="prefix_cache",
            default_text="a quarter of what --memory leaves, up to 4 GiB",
            help="Largest size of that cache in memory.",
        ),
    ]
    prefix_cache_disk: Annotated[
        str | int | None,
        Option(
            kind=Size(),
            group="prefix_cache",
            default_text="4 GiB, or a tenth of the free disk space if that is less",
            help="Largest size of that cache on disk.",
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
            help="Alternatives to draft for each next token, such as 3,2 for the first two. auto: as many as"
            " make replies faster.",
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
            help="Let the draft model read only the last N tokens of the text; 0 means all.",
        ),
    ]
    draft_sinks: Annotated[
        int,
        Option(
            kind=Integer(0),
            group="drafting",
            default=4,
            read_by=("model", "lowbit"),
            help="First tokens of the text that the draft model reads in addition to its window.",
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
            help="Number of layers that draft with method layerskip. MLX models only.",
        ),
    ]
    corpus: Annotated[
        str | PathLike[str] | None,
        Option(
            kind=PathName(),
            group="drafting",
            read_by=("suffix",),
            help="Text file or folder that method suffix looks up likely continuations in, for example the"
            " code you are editing.",
        ),
    ]
    remember: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="drafting",
            default=False,
            help="Save prompts and replies on this machine, readable by you only. Method suffix drafts from"
            " them later.",
        ),
    ]
    learn: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="drafting",
            default=False,
            read_by=("model",),
            help="Train an MLX draft model between replies, on tokens that it drafted wrongly.",
        ),
    ]
    max_loss: Annotated[
        float | None,
        Option(
            kind=Share(),
            group="drafting",
            default_text="2% for auto, no limit for named drafters",
            help="Largest slowdown of a reply that drafting may cause, as a share of the reply's time, plus"
            " the time of two tokens. If given, it holds for named drafters too.",
        ),
    ]
    measure_costs: Annotated[
        bool,
        Option(
            kind=Flag(),
            group="drafting",
            default=True,
            help="When a model is first loaded, measure for a second or two how fast it checks several"
            " tokens at once. Otherwise this is measured during replies.",
        ),
    ]
    method: Annotated[str, _METHOD]
    methods: Annotated[
        Sequence[str],
        Option(
            kind=MethodList(),
            group="method",
            default=(),
            api_only=True,
            help="Methods that replies may use besides `method`. What they need is loaded as well.",
        ),
    ]
    draft_length: Annotated[int | None, _DRAFT_LENGTH]
    acceptance: Annotated[str, _ACCEPTANCE]


class ReplyArguments(TypedDict, total=False):
    """Keyword arguments of a reply: `Runtime.generate`, `Runtime.stream` and `Chat.send`.

    A method, draft length or acceptance of None is the one the model was loaded with.
    """

    max_tokens: Annotated[
        int | None,
        Option(
            kind=Integer(1, _MAX_SEED),
            group="reply",
            default_text="8192, or the end of the context",
            flags=("-n",),
            help="Longest reply, in tokens.",
        ),
    ]
    seed: Annotated[
        int | None,
        Option(
            kind=Integer(0, _MAX_SEED),
            group="reply",
            default_text="a new one each time",
            help="Seed of the random draws. The same seed gives the same reply with every method (but see"
            " --acceptance).",
        ),
    ]
    stop: Annotated[
        str | Sequence[str],
        Option(
            kind=TextList(),
            group="reply",
            default=(),
            help="End the reply before this text. May be repeated.",
        ),
    ]
    method: Annotated[str | None, _METHOD]
    draft_length: Annotated[int | None, _DRAFT_LENGTH]
    acceptance: Annotated[str | None, _ACCEPTANCE]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: Mapping[int, float]


# Defaults, limits and types of the sampling settings stand in SamplingParams.
_SAMPLING_HELP = {
    "temperature": ("T", "Randomness of the reply; 0 always takes the most likely token."),
    "top_k": ("N", "Consider only the N most likely tokens; 0 turns this off."),
    "top_p": ("P", "Consider only the most likely tokens that add up to this probability; 1 turns this off."),
    "min_p": ("P", "Drop tokens less likely than this share of the most likely one; 0 turns this off."),
    "typical_p": ("P", "Typical sampling: keep this much probability; 1 turns this off."),
    "repetition_penalty": ("X", "Make repeated tokens less likely by this factor; 1 turns this off."),
    "presence_penalty": ("X", "Subtract this from the score of every repeated token; 0 turns this off."),
    "frequency_penalty": ("X", "Subtract this from a token's score for each repetition; 0 turns this off."),
    "penalty_window": ("N", "How many of the last tokens the penalties look at; -1 means all."),
    "logit_bias": (
        "ID=VALUE",
        "Add to the score of one token id, such as 1523=-2.5; -inf forbids it. May be repeated.",
    ),
}


def _declared(arguments: type) -> dict[str, Option]:
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _sampling_options() -> dict[str, Option]:
    options = {}
    for each in fields(SamplingParams):
        metavar, help_text = _SAMPLING_HELP[each.name]
        default = {} if each.default is MISSING else each.default
        kind = SamplingNumber(metavar, isinstance(default, int))
        options[each.name] = Option(
            kind=TokenBiases() if each.default is MISSING else kind,
            group="sampling",
            default=default,
            help=help_text,
        )
    return options


LOAD_OPTIONS: Mapping[str, Option] = MappingProxyType(_declared(LoadArguments))
"""The options of `load` and `plan`, besides the target, the draft model and `progress`."""

REPLY_OPTIONS: Mapping[str, Option] = MappingProxyType(_declared(ReplyArguments) | _sampling_options())
"""The options of one reply."""

MODEL_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "target": Option(
            kind=ModelName(),
            group="model",
            default="demo",
            help="The model to run: a .gguf file, an MLX folder, user/repo:quant, or a name (see `edgespec"
            " models list`).",
        ),
        "draft": Option(
            kind=ModelName("REF|auto|none", "auto, none, "),
            group="model",
            default="auto",
            help="The draft model, a small model that makes the other one faster. auto: the best one on this"
            " machine (see `edgespec models show`). none: no draft model.",
        ),
    }
)
"""The two models, which `load` and `plan` take as positional arguments."""

SETTINGS: Mapping[str, Option] = MappingProxyType(
    {
        name: option
        for options in (
            MODEL_OPTIONS,
            LOAD_OPTIONS,
            {"system": Option(kind=Text(), group="reply", help="Instructions for the model.")},
            REPLY_OPTIONS,
        )
        for name, option in options.items()
        if not (option.per_run or option.api_only)
    }
)
"""The options that can be set for all runs, in the settings file or the environment."""


def check_names(given: Iterable[str], known: Mapping[str, Option]) -> None:
    """Raise OptionError, with the nearest name, for the first option that is not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise OptionError(
                f"option {name!r} is unknown",
                f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}",
            )


def check_load_arguments(given: Mapping[str, Any]) -> LoadArguments:
    """Return all options of `load`, each in its usual form, with defaults for what is not given.

    Raises:
        OptionError: A name is unknown, a value is wrong, or no drafter of the methods reads an option.
    """
    check_names(given, LOAD_OPTIONS)
    values = {
        name: option.check(name, given[name]) if name in given else option.default
        for name, option in LOAD_OPTIONS.items()
    }
    arguments = cast(LoadArguments, values)
    methods = (arguments["method"], *arguments["methods"])
    ignored = unread_options(methods)
    for name in ignored:
        option = LOAD_OPTIONS[name]
        if values[name] != option.default:
            raise OptionError(
                f"{name} is for {' and '.join(option.read_by)},"
                f" and method {', '.join(dict.fromkeys(methods))} asks for none of them",
                f"leave it out, or add {option.read_by[0]} to the method",
            )
    return arguments


def unread_options(methods: Iterable[str]) -> list[str]:
    """Return the names of the options that no drafter of these methods reads. Raises OptionError."""
    drafters = {name for method in methods for name in parse_method(method)}
    return [
        name
        for name, option in LOAD_OPTIONS.items()
        if option.read_by and drafters.isdisjoint(option.read_by)
    ]


_PAGE = """# Options

On the command line an option is written `--draft-window`, in Python and in the settings file
`draft_window`. The environment variable of a setting is its name in capitals after `EDGESPEC_`.

## Loading a model

`edgespec.load(target, draft, ...)` and `edgespec.plan(target, draft, ...)` take these options.

{load}
## Replies

`Runtime.generate(prompt, ...)` and the other methods that write a reply take these options.

{reply}"""


def documentation() -> str:
    """Return the page of the documentation that lists every option (`docs/options.md`)."""
    load = options_table({**MODEL_OPTIONS, **LOAD_OPTIONS})
    return _PAGE.format(load=load, reply=options_table(REPLY_OPTIONS))


def options_table(options: Mapping[str, Option]) -> str:
    """Return a Markdown table of options: name, default, what they do, and which methods read them."""
    lines = ["| option | default | what it does | read by |", "| --- | --- | --- | --- |"]
    for name, option in options.items():
        default = option.default_text or (
            "none" if option.default in (None, (), {}) else str(option.default).lower()
        )
        readers = ", ".join(option.read_by) or "every method"
        lines.append(f"| `{name}` | {default} | {option.help} | {readers} |".replace("|N", "\\|N"))
    return "\n".join(lines) + "\n"
