"""Parse the bytes of a request body as JSON.

JSON must be UTF-8, but some clients use another encoding or send half of an emoji's surrogate pair.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import ValidationError

from edgespec.server.errors import ApiError, invalid_request

__all__ = ["parse_body"]

_Body = TypeVar("_Body")

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:+-]+)", re.IGNORECASE)
# Python's names for the encodings that clients may specify in Content-Type. Python's other codecs are slow or
# are not text encodings.
_ENCODINGS = frozenset(
    {"ascii", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"}
    | {"iso8859-1", "iso8859-2", "iso8859-9", "iso8859-15", "cp1250", "cp1251", "cp1252", "koi8-r"}
    | {"shift_jis", "euc_jp", "gbk", "gb18030", "big5", "euc_kr"}
)
_POSITION = re.compile(r"(.*) at line (\d+) column (\d+)", re.DOTALL)
_FORM = re.compile(r"\s*[\w.\[\]-]+=")
# Number of characters of the body that error messages quote before and after an error.
_SHOWN_BEFORE, _SHOWN_AFTER = 24, 12


def parse_body(data: bytes, headers: Mapping[str, str], parse: Callable[[str], _Body]) -> _Body:
    """Parse the JSON in a request body.

    A byte order mark is skipped. Lone surrogates, which programs produce when they truncate text in the
    middle of an emoji, become U+FFFD.

    Args:
        data: The body.
        headers: The HTTP headers, with lower-case names.
        parse: Parses JSON with pydantic.

    Raises:
        ApiError: The body is not JSON in a supported encoding. The message says what is wrong and where.
        ValidationError: The JSON is not what `parse` expects.
    """
    content_type = headers.get("content-type", "")
    coding = headers.get("content-encoding", "").strip().lower()
    packed = next((name for magic, name in _COMPRESSED.items() if data.startswith(magic)), coding)
    if packed not in ("", "identity"):
        raise ApiError(
            415,
            f"the request body is compressed with {packed[:40]}, which the server does not support; send it"
            " uncompressed, without a Content-Encoding header",
            code="unsupported_encoding",
        )
    text = _decoded(data, content_type)
    if not text.strip():
        raise invalid_request("the request body is empty; send a JSON object", code="invalid_json")
    if text.lstrip().startswith('"'):
        raise invalid_request(
            "the request body is a JSON string instead of an object, perhaps because it was encoded as JSON"
            " twice; send the object itself",
            code="invalid_json",
        )
    try:
        return parse(text)
    except ValidationError as error:
        problem = _syntax_problem(error)
        if problem is None:
            raise
    whole = _without_halves(text)
    try:
        if whole is not None:
            return parse(whole)
    except ValidationError as error:
        if _syntax_problem(error) is None:
            raise
    raise _syntax_error(problem, text, content_type)


def _decoded(data: bytes, content_type: str) -> str:
    """Decode a request body.

    UTF-16 and UTF-32 are recognised by a byte order mark or by their zero bytes. Valid UTF-8 takes precedence
    over the encoding in Content-Type, because clients often declare the wrong encoding, whereas text in
    another encoding is rarely valid UTF-8.
    """
    detected = json.detect_encoding(data)
    try:
        return data.decode("utf-8-sig" if detected == "utf-8" else detected)
    except UnicodeDecodeError as error:
        wrong = error
    named = _CHARSET.search(content_type)
    encoding = _codec(named[1]) if named else ""
    if encoding not in ("", "utf-8", "ascii"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError as error:
            wrong = error
    before = data[: wrong.start].decode(wrong.encoding, "replace")[-_SHOWN_BEFORE:]
    raise invalid_request(
        f"the request body is not valid {wrong.encoding.upper()}: byte 0x{data[wrong.start]:02x} at position"
        f" {wrong.start}{_after(before)}; send UTF-8, or specify the encoding in the Content-Type header,"
        " for example application/json; charset=iso-8859-1",
        code="invalid_encoding",
    )


def _codec(charset: str) -> str:
    """Return Python's name for an encoding. Raises ApiError if the encoding is unknown or not supported."""
    try:
        name = codecs.lookup(charset).name
    except LookupError:
        name = ""
    if name not in _ENCODINGS:
        raise ApiError(
            415,
            f"Content-Type specifies the charset {charset[:40]}, which the server does not support;"
            " send UTF-8",
            code="unsupported_encoding",
        )
    return name


def _syntax_problem(error: ValidationError) -> str | None:
    problem = error.errors(include_url=False, include_input=False)[0]
    return str(problem["ctx"]["error"]) if problem["type"] == "json_invalid" else None


def _without_halves(text: str) -> str | None:
    """Replace lone surrogates in JSON text with U+FFFD. Return None if the text is not JSON."""
    try:
        # Python's parser, unlike pydantic's, accepts lone surrogates.
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    encoded = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return encoded.decode("utf-16-le", "replace")


def _syntax_error(problem: str, text: str, content_type: str) -> ApiError:
    """Return the error for text that is not JSON.

    Args:
        problem: The JSON parser's message, with the line and the column in bytes.
        text: The text.
        content_type: The Content-Type header.
    """
    if "recursion limit" in problem:
        return invalid_request(
            "the JSON in the request body is nested too deeply; use at most 200 levels", code="invalid_json"
        )
    if "multipart/" in content_type.lower() or _FORM.match(text):
        return invalid_request(
            "the request body is form data, not JSON; send a JSON object", code="invalid_json"
        )
    # The parser reports the cause and the position only as text.
    position = _POSITION.fullmatch(problem)
    if position is None:
        return invalid_request(
            f"the request body is not valid JSON: {problem[:200]}; correct it",
            code="invalid_json",
        )
    reason, number, column = position[1], int(position[2]), int(position[3])
    lines = text.split("\n")
    if column == 0 and number > 1:
        # The parser reports a position after the line break, so go back one line.
        number -= 1
        column = len(lines[number - 1].encode()) + 1
    line = lines[number - 1].encode()
    before = line[:column].decode("utf-8", "replace")
    shown = f"{before[-_SHOWN_BEFORE:]}{line[column:].decode('utf-8', 'replace')[:_SHOWN_AFTER]}"
    if reason == "key must be a string" and "'" in shown:
        reason = "JSON needs double quotes"
    elif reason.startswith("EOF"):
        reason = "the body ends too early"
    elif reason.startswith("control character"):
        reason = "line breaks and other control characters in a string must be escaped, such as \\n"
    return invalid_request(
        f"the request body is not valid JSON at line {number}, column {len(before)}{_near(shown)}: {reason};"
        " correct it at that point",
        code="invalid_json",
    )


def _near(text: str) -> str:
    """Return a note that quotes the text around an error, or an empty string if there is nothing to quote."""
    shown = "".join(each if each.isprintable() else " " for each in text).strip()
    return f", near `{shown}`" if shown else ""


def _after(text: str) -> str:
    return _near(text).replace("near", "after", 1)
