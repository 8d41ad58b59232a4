"""Replies with tool calls from many model families, and strings from their chat templates."""

from __future__ import annotations

from dataclasses import dataclass

ARGUMENTS = '{"city": "Zürich \\"Nord\\"", "days": 3, "units": ["C", "F"], "deep": {"a": null}}'
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object"},
        "live": {"type": "boolean"},
        "code": {"type": "string"},
    },
    "required": ["city"],
}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        template: Strings from the chat template.
        call: A reply with one call of `get_weather` with `ARGUMENTS`.
        calls: A reply with text, the same call, and a call of `now` without arguments.
    """

    template: str
    call: str
    calls: str


def _tagged(name: str, *arguments: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _glm(name: str, *arguments: tuple[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>{name}\n{inner}</tool_call>"


def _minimax(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


def _dsml(block: str, *calls: str) -> str:
    return f"<｜DSML｜{block}>\n{''.join(calls)}</｜DSML｜{block}>"


_VALUES = (("city", 'Zürich "Nord"'), ("days", "3"), ("units", '["C", "F"]'), ("deep", '{"a": null}'))
_INVOKED = (
    '<invoke name="get_weather">\n'
    + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in _VALUES)
    + "</invoke>\n"
)
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + ARGUMENTS + "<｜tool▁call▁end｜>"
_R1_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + ARGUMENTS
    + "\n```<｜tool▁call▁end｜>"
)
_KIMI_CALL = (
    "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>"
)
_JSON = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"
_JSON_NOW = '{"name": "now", "arguments": {}}'
_COMMAND_R = '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + ARGUMENTS + "}"

_DSML_CALL = (
    '<｜DSML｜invoke name="get_weather">\n'
    + "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if key == "city" else "false"}">{value}'
        "</｜DSML｜parameter>\n"
        for key, value in _VALUES
    )
    + "</｜DSML｜invoke>\n"
)
_DSML_NOW = '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
_GEMMA_CALL = (
    '<|tool_call>call:get_weather{city:<|"|>Zürich "Nord"<|"|>,days:3,units:[<|"|>C<|"|>,<|"|>F<|"|>],'
    "deep:{a:null}}<tool_call|>"
)
_PYTHON_CALL = 'get_weather(city="Zürich \\"Nord\\"", days=3, units=["C", "F"], deep={"a": null})'


def _function_gemma(reply: str) -> str:
    """Return a reply of Gemma 4 as FunctionGemma would write it."""
    markers = (
        ('<|"|>', "<escape>"),
        ("<|tool_call>", "<start_function_call>"),
        ("<tool_call|>", "<end_function_call>"),
    )
    for gemma, function_gemma in markers:
        reply = reply.replace(gemma, function_gemma)
    return reply


FAMILIES = {
    "qwen3": Family(
        '<tools> {{ tools }} <tool_call>\\n{"name": ',
        f"<tool_call>\n{_JSON}\n</tool_call>",
        f"Sure.\n<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_JSON_NOW}\n</tool_call>",
    ),
    "qwen3-coder": Family(
        "<tool_call>\n<function=example><parameter=a>",
        _tagged("get_weather", *_VALUES),
        "Sure.\n" + _tagged("get_weather", *_VALUES) + "\n" + _tagged("now"),
    ),
    "glm-4.5": Family(
        "<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>",
        _glm("get_weather", *_VALUES),
        "Sure.\n" + _glm("get_weather", *_VALUES) + "\n" + _glm("now"),
    ),
    "seed-oss": Family(
        "<seed:tool_call>\n<function=example>",
        _tagged("get_weather", *_VALUES).replace("tool_call", "seed:tool_call"),
        ("Sure." + _tagged("get_weather", *_VALUES) + _tagged("now")).replace("tool_call", "seed:tool_call"),
    ),
    "minimax-m2": Family(
        '<minimax:tool_call>\n<invoke name="a">',
        _minimax(_INVOKED),
        "Sure." + _minimax(_INVOKED, '<invoke name="now">\n</invoke>\n'),
    ),
    "llama-3": Family(
        '<|eot_id|> {"name": function name, "parameters": dictionary of argument name and its value}',
        '{"name": "get_weather", "parameters": ' + ARGUMENTS + "}",
        'Sure.<|python_tag|>{"name": "get_weather", "parameters": '
        + ARGUMENTS
        + '}\n{"type": "function", "name": "now", "parameters": {}}',
    ),
    "mistral-nemo": Family(
        '[TOOL_CALLS][{"name": ',
        f"[TOOL_CALLS][{_JSON}]",
        f"Sure.[TOOL_CALLS] [{_JSON}, {_JSON_NOW[:-1]}, " + '"id": "abcdefghi"}]',
    ),
    "mistral-small-3.2": Family(
        "[TOOL_CALLS]name[ARGS]",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
        f"Sure.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}",
    ),
    "gpt-oss": Family(
        '<|channel|>commentary "functions." + tool_call.name',
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
        f"Sure.<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}"
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}",
    ),
    "deepseek-v3.1": Family(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        f"<｜tool▁calls▁begin｜>{_DEEPSEEK_CALL}<｜tool▁calls▁end｜>",
        f"Sure.\n<｜tool▁calls▁begin｜>{_DEEPSEEK_CALL}\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-r1": Family(
        "<｜tool▁calls▁begin｜> '```json'",
        f"<｜tool▁calls▁begin｜>{_R1_CALL}<｜tool▁calls▁end｜>",
        f"Sure.\n<｜tool▁calls▁begin｜>{_R1_CALL}\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi-k2": Family(
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{_KIMI_CALL}<|tool_calls_section_end|>",
        f"Sure.<|tool_calls_section_begin|>{_KIMI_CALL}"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
    ),
    "command-r7b": Family(
        "<|START_ACTION|>",
        f"<|START_ACTION|>[\n    {_COMMAND_R}\n]<|END_ACTION|>",
        f"Sure.<|START_ACTION|>[{_COMMAND_R},\n"
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    ),
    "nemotron-nano-2": Family(
        "<TOOLCALL>[",
        f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
        f"Sure.\n<TOOLCALL>[{_JSON}, {_JSON_NOW}]</TOOLCALL>",
    ),
    "phi-4-mini": Family(
        "<|tool_call|> <|/tool_call|>",
        f"<|tool_call|>[{_JSON}]<|/tool_call|>",
        f"Sure.<|tool_call|>[{_JSON}, {_JSON_NOW}]<|/tool_call|>",
    ),
    "deepseek-v3.2": Family(
        "'｜DSML｜' 'function_calls>'",
        _dsml("function_calls", _DSML_CALL),
        "Sure.\n\n" + _dsml("function_calls", _DSML_CALL, _DSML_NOW),
    ),
    "deepseek-v4": Family(
        "'｜DSML｜' 'tool_calls>'",
        _dsml("tool_calls", _DSML_CALL),
        "Sure.\n\n" + _dsml("tool_calls", _DSML_CALL, _DSML_NOW),
    ),
    "gemma-4": Family(
        "'<|tool_call>call:' + function['name'] + '{'",
        _GEMMA_CALL,
        f"Sure.{_GEMMA_CALL}<|tool_call>call:now{{}}<tool_call|>",
    ),
    "function-gemma": Family(
        "<start_function_call>",
        _function_gemma(_GEMMA_CALL),
        _function_gemma(f"Sure.{_GEMMA_CALL}<|tool_call>call:now{{}}<tool_call|>"),
    ),
    "lfm2": Family(
        '<|im_start|>system "List of tools: ["',
        f"<|tool_call_start|>[{_PYTHON_CALL}]<|tool_call_end|>",
        f"Sure.<|tool_call_start|>[{_PYTHON_CALL}, now()]<|tool_call_end|>",
    ),
    "granite-3": Family(
        "<|tool_call|> followed by a JSON list",
        f"<|tool_call|>[{_JSON}]",
        f"Sure.<|tool_call|>[{_JSON},{_JSON_NOW}]",
    ),
}
"""The families by name."""
