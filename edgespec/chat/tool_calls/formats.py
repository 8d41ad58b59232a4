"""The formats in which models write tool calls, recognised by their chat templates.

No existing library fits. The response templates of transformers (`utils/chat_parsing`) and the
parsers of mlx-lm return a call only when it is complete, raise an error if it is invalid, and need packages
that GGUF models do not need. Models share a few forms, however, so one table covers them.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.chat.tool_calls.form import CallForm
from edgespec.chat.tool_calls.json_form import JsonForm
from edgespec.chat.tool_calls.named_form import NamedForm
from edgespec.chat.tool_calls.tagged_form import TaggedForm

__all__ = ["HERMES", "call_form"]

# The format of Qwen 2.5 and 3, Hermes, SmolLM3, Granite 4 and many others, and the default for templates
# without tool calls.
HERMES = JsonForm(("<tool_call>",), ("</tool_call>",), ("<tool_call>\n{", "}\n</tool_call>"))

_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


def _function_tags(opening: str, closing: str) -> TaggedForm:
    return TaggedForm(
        opens=(opening, "<function="),
        name_end=">",
        key=("<parameter=", ">"),
        value_end="</parameter>",
        call_end="</function>",
        padded=True,
        closes=(closing,),
    )


# The formats, each with texts that identify the chat templates of its models. The first match counts.
_FORMS: tuple[tuple[Sequence[str], CallForm], ...] = (
    # The format of gpt-oss, in which the tool's name can also precede the channel.
    (
        ("<|channel|>", "functions."),
        NamedForm(
            opens=(
                "<|start|>assistant<|channel|>commentary to=functions.",
                "<|start|>assistant to=functions.",
                "<|channel|>commentary to=functions.",
                " to=functions.",
            ),
            separators=("<|message|>",),
            around=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
            markers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
            reasoning_ends=("<|start|>assistant<|channel|>commentary", "<|start|>assistant to="),
            header=r"([\w.:/-]+?)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?",
        ),
    ),
    # The format of DeepSeek R1 and V3.
    (
        ("<｜tool▁calls▁begin｜>", "```json"),
        NamedForm(
            opens=(*_DEEPSEEK[:2], "function<｜tool▁sep｜>"),
            separators=("```json",),
            around=(
                "".join(_DEEPSEEK[:2]) + "function<｜tool▁sep｜>",
                "\n```json\n",
                "\n```" + "".join(_DEEPSEEK[3:]),
            ),
            markers=_DEEPSEEK,
            closes=("```", *_DEEPSEEK[3:]),
        ),
    ),
    # The format of DeepSeek V3.1.
    (
        ("<｜tool▁calls▁begin｜>",),
        NamedForm(
            opens=_DEEPSEEK[:2],
            separators=_DEEPSEEK[2:3],
            around=("".join(_DEEPSEEK[:2]), "<｜tool▁sep｜>", "".join(_DEEPSEEK[3:])),
            markers=_DEEPSEEK,
            closes=_DEEPSEEK[3:],
        ),
    ),
    # The format of Kimi K2, which numbers its calls.
    (
        ("<|tool_calls_section_begin|>",),
        NamedForm(
            opens=_KIMI[:2],
            separators=_KIMI[2:3],
            around=("".join(_KIMI[:2]) + "functions.", ":0<|tool_call_argument_begin|>", "".join(_KIMI[3:])),
            markers=_KIMI,
            closes=_KIMI[3:],
            header=r"(?:functions\.)?([\w./-]+)(?::\d+)?",
        ),
    ),
    # The format of Mistral's models since Small 3.2.
    (
        ("[TOOL_CALLS]", "[ARGS]"),
        NamedForm(
            opens=("[TOOL_CALLS]",),
            separators=("[ARGS]",),
            around=("[TOOL_CALLS]", "[ARGS]", ""),
            markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
            header=r"([\w.:/-]+)(?:\[CALL_ID\]\w+)?",
        ),
    ),
    # The format of Mistral 7B, Nemo and Small 3.
    (("[TOOL_CALLS]",), JsonForm(("[TOOL_CALLS]",), around=("[TOOL_CALLS][{", "}]"))),
    # The format of GLM 4.5 and later.
    (
        ("<arg_key>", "<arg_value>"),
        TaggedForm(
            opens=("<tool_call>",),
            name_end="\n",
            key=("<arg_key>", "</arg_key>"),
            value_open="<arg_value>",
            value_end="</arg_value>",
            call_end="</tool_call>",
        ),
    ),
    # The format of Qwen3-Coder, Qwen 3.5, Nemotron 3 and others, which sometimes omit the first marker.
    (("<tool_call>", "<function=", "<parameter="), _function_tags("<tool_call>", "</tool_call>")),
    # The format of Seed-OSS.
    (("<seed:tool_call>", "<function="), _function_tags("<seed:tool_call>", "</seed:tool_call>")),
    # The format of MiniMax M2.
    (
        ("<minimax:tool_call>", "<invoke name="),
        TaggedForm(
            opens=("<minimax:tool_call>", '<invoke name="'),
            name_end='">',
            key=('<parameter name="', '">'),
            value_end="</parameter>",
            call_end="</invoke>",
            closes=("</minimax:tool_call>",),
        ),
    ),
    # The format of Command R7B and Command A.
    (
        ("<|START_ACTION|>",),
        JsonForm(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            ('<|START_ACTION|>[{"tool_call_id": "0", ', "}]<|END_ACTION|>"),
            name_key="tool_name",
            argument_key="parameters",
        ),
    ),
    # The format of Nemotron Nano 2.
    (("<TOOLCALL>",), JsonForm(("<TOOLCALL>",), ("</TOOLCALL>",), ("<TOOLCALL>[{", "}]</TOOLCALL>"))),
    # The format of Phi 4 mini.
    (
        ("<|tool_call|>", "<|/tool_call|>"),
        JsonForm(("<|tool_call|>",), ("<|/tool_call|>",), ("<|tool_call|>[{", "}]<|/tool_call|>")),
    ),
    # The format of Granite 3.
    (("<|tool_call|>",), JsonForm(("<|tool_call|>", "<tool_call>"), (), ("<|tool_call|>[{", "}]"))),
    # The format of Llama 3.
    (
        ("<|eot_id|>", '"parameters": dictionary of argument name'),
        JsonForm(("<|python_tag|>",), (), argument_key="parameters", starts_bare=True),
    ),
)


def call_form(template: str) -> CallForm:
    """Return the tool-call format of the model with this chat template."""
    return next((form for texts, form in _FORMS if all(text in template for text in texts)), HERMES)
