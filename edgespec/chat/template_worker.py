"""Script that renders one chat template in a child process. It imports nothing from edgespec.

The script reads requests from stdin and writes replies to stdout until stdin is closed. Each message is a
JSON object, preceded by its length as 8 bytes. The first request contains the source of the template.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

__all__ = [
    "CPU_SECONDS",
    "answer",
    "compile_template",
    "encode",
    "memory_limit_bytes",
    "output_limit_bytes",
    "read_message",
    "write_message",
]

# Maximum CPU time in seconds for rendering a prompt. A chat of 5,000 messages takes 0.2 seconds.
CPU_SECONDS = 2.0
# Maximum length of a template's error message in characters.
_MAX_ERROR_CHARACTERS = 300
# Advice that Python appends to its error about long integers. It is removed, because it does not help users.
_PYTHON_ADVICE = "; use sys.set_int_max_str_digits() to increase the limit"


def memory_limit_bytes(request_bytes: int) -> int:
    """Return the memory limit for a request, in bytes.

    The interpreter and a short chat need about 100 MiB. In a long chat, each character takes up to 4 bytes,
    and up to 8 copies of the chat exist at once.
    """
    return (512 << 20) + 32 * request_bytes


def output_limit_bytes(request_bytes: int) -> int:
    """Return the maximum size of a rendered prompt in bytes, including text that the template adds."""
    return (1 << 20) + 4 * request_bytes


def read_message(stream: IO[bytes], max_bytes: int | None = None) -> tuple[dict[str, Any], int] | None:
    """Read a message and return it with its size in bytes, or None if it is too long or the stream ended."""
    header = stream.read(8)
    size_bytes = int.from_bytes(header, "big")
    if len(header) < 8 or (max_bytes is not None and size_bytes > max_bytes):
        return None
    data = stream.read(size_bytes)
    if len(data) < size_bytes:
        return None
    return json.loads(data.decode("utf-8", "surrogatepass")), size_bytes


def write_message(stream: IO[bytes], data: bytes) -> None:
    """Write an encoded message, preceded by its length."""
    stream.write(len(data).to_bytes(8, "big"))
    stream.write(data)
    stream.flush()


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as JSON."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


class Arguments(dict[str, Any]):
    """The arguments of a tool call: a dictionary that prints as JSON.

    Some published templates expect an object, others a string to print or concatenate.
    """

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _print_arguments_as_json(messages: list[dict[str, Any]]) -> None:
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], dict):
                function["arguments"] = Arguments(function["arguments"])


def compile_template(source: str) -> Template:
    """Compile a template in a sandbox, providing the functions that chat templates use."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """The tag `{% generation %}`, which marks replies for training and does not change the prompt."""

        tags = {"generation"}  # noqa: RUF012 - the base class wants a set

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(source)
    except SyntaxError as error:
        # Jinja raises a plain SyntaxError only for excessive nesting.
        raise RecursionError from error


def answer(request: dict[str, Any], template: Template | None) -> tuple[bytes, Template | None]:
    """Compile the first request's template, or render it with a later request's variables.

    Args:
        request: The decoded request.
        template: The template, or None for the first request.

    Returns:
        The encoded reply, and the template, or None if it cannot be compiled.
    """
    try:
        if template is None:
            template = compile_template(request["source"])
            return encode({"text": ""}), template
        _print_arguments_as_json(request["messages"])
        return encode({"text": template.render(**request)}), template
    except MemoryError:
        return encode({"error": "memory"}), template
    except RecursionError:
        return encode({"error": "nesting"}), template
    except Exception as error:
        text = " ".join(str(error).replace(_PYTHON_ADVICE, "").split())[:_MAX_ERROR_CHARACTERS]
        return encode({"error": "syntax" if template is None else "rejected", "message": text}), template


def main() -> None:
    """Answer requests until stdin is closed."""
    # Add the folders that contain Jinja, because `python -I` may not find it.
    sys.path += sys.argv[1:]
    template: Template | None = None
    while message := read_message(sys.stdin.buffer):
        request, size_bytes = message
        _limit_memory(memory_limit_bytes(size_bytes))
        _limit_cpu_time(CPU_SECONDS)
        data, template = answer(request, template)
        if len(data) > output_limit_bytes(size_bytes):
            data = encode({"error": "output"})
        _limit_cpu_time(0)
        write_message(sys.stdout.buffer, data)


def _limit_memory(limit_bytes: int) -> None:
    """Limit this process's memory. macOS ignores this limit, so the parent process checks it as well."""
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_cpu_time(seconds: float) -> None:
    """Limit this process to `seconds` of CPU time, even during a native call. 0 removes the limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Encode a value as JSON. Accepts the same arguments as the `tojson` filter in transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


if __name__ == "__main__":
    main()
