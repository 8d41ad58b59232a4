"""Extract text and images from message content in the formats of all supported APIs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from edgespec.chat.message import PlacedImage
from edgespec.errors import AttachmentError
from edgespec.model.image import Image
from edgespec.server.errors import invalid_request, unsupported_content

__all__ = [
    "SystemPrompt",
    "content_of",
    "image_of",
    "is_text",
    "omitted_parts",
    "part_text",
    "plain_message",
    "read_image",
    "reasoning_of",
    "result_text",
    "system_messages",
    "text_of",
]

# The field that holds a part's text, keyed by part type.
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
# The fields that may hold a reply's reasoning, keyed by part type. Redacted reasoning can be read only by the
# server that produced it.
_REASONING_FIELDS = {
    "thinking": ("thinking", "text"),
    "reasoning": ("text", "reasoning"),
    "redacted_thinking": (),
}

# Types of non-text parts. A tool result that is an object of any other type is treated as data.
_MEDIA = frozenset(
    {"image", "image_url", "input_image", "computer_screenshot", "audio", "input_audio", "video", "video_url"}
    | {"file", "input_file", "document"}
)
# Fields of unknown parts that can hold encoded files or encrypted text, which models cannot read.
_DATA_FIELDS = ("blob", "data", "encrypted_content")
# The field that holds an image, keyed by part type.
_IMAGES = {"image_url": "image_url", "input_image": "image_url", "image": "source"}
# Role names used by LangChain, Gemini and ShareGPT, mapped to OpenAI's.
_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "gpt": "assistant"}

SystemPrompt: TypeAlias = str | list[Any] | None
"""The type of the `system` field: text or a list of parts."""


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise a message to use OpenAI's role names, with a string or a list of objects as its content.

    Tool results can be any JSON.
    """
    message = dict(message)
    if isinstance(role := message.get("role"), str):
        message["role"] = role = _ROLES.get(role.lower(), role.lower())
    content = message.get("content")
    is_data = not isinstance(content, str | list | None) and _kind(content) not in _MEDIA
    if role in ("tool", "function") and is_data:
        message["content"] = json.dumps(content, ensure_ascii=False)
    elif isinstance(content, Mapping):
        message["content"] = [content]
    elif isinstance(content, list) and any(isinstance(part, str) for part in content):
        message["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in content
        ]
    return message


def system_messages(system: SystemPrompt) -> list[dict[str, Any]]:
    """Convert the `system` field to a list with one system message, or an empty list if it has no text."""
    text = text_of("system", system)
    return [{"role": "system", "content": text}] if text else []


def text_of(place: str, content: Any) -> str:
    """Return the text of `content`, which is a string or a list of strings and typed objects.

    Raises:
        ApiError: A part is not text (an image, for example) or has no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part_text(f"{place}.{at}", part) for at, part in enumerate(content))


def content_of(parts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Combine (location, part) pairs into the text and images of a message.

    Texts are joined with newlines, except next to images, as in llama.cpp's server.

    Raises:
        ApiError: A part is neither text nor an image, or cannot be read.
    """
    text, images, separator = "", [], ""
    for place, part in parts:
        image = image_of(place, part)
        if image is None:
            text, separator = text + separator + part_text(place, part), "\n"
        else:
            images.append(PlacedImage(image, len(text)))
            separator = ""
    return {"content": text, "images": images}


def image_of(place: str, part: Any) -> Image | None:
    """Return the image in a content part of any supported API, or None if the part is not an image.

    Raises:
        ApiError: The image is not contained in the request, or cannot be read.
    """
    kind = _kind(part)
    if kind not in _IMAGES or isinstance(part, str):
        return None
    source = _field(part, _IMAGES[kind])
    if kind == "image":
        # Anthropic's blocks name the encoding of their data.
        data = _field(source, "data") if _field(source, "type") == "base64" else None
    else:
        url = _field(source, "url") if isinstance(source, Mapping) else source
        data = url if isinstance(url, str) and url.startswith("data:") else None
    if not isinstance(data, str):
        raise invalid_request(
            f"{place} links to an image, which the server does not download; send the image itself as a"
            " data: URL in base64",
            param=place,
            code="unsupported_content",
        )
    return read_image(place, data)


def read_image(place: str, data: str) -> Image:
    """Decode a base64 image. Raises ApiError if it cannot be read."""
    try:
        return Image.from_base64(data, place)
    except AttachmentError as error:
        raise invalid_request(str(error), param=place, code=error.code) from error


def result_text(place: str, content: Any) -> str:
    """Return the text of a tool result, with a note in place of each image or file.

    An agent cannot remove a tool result from its conversation, so don't reject images in tool results. Use
    `omitted_parts` to list the omitted parts. Parts of unknown types, such as the results of a web search,
    are kept as JSON.
    """
    parts = _parts(place, content)
    if parts is not None:
        return "\n".join(part_text(at, part) if is_text(part) else _any_text(part) for at, part in parts)
    if isinstance(content, Mapping):
        return json.dumps(content, ensure_ascii=False)
    return text_of(place, content)


def omitted_parts(place: str, content: Any) -> list[str]:
    """Return the locations of the images and files in a tool result."""
    parts = _parts(place, content) or ()
    return [at for at, part in parts if _kind(part) in _MEDIA and not is_text(part)]


def _parts(place: str, content: Any) -> list[tuple[str, Any]] | None:
    """Return the (location, part) pairs of a tool result, or None if it does not consist of parts."""
    if isinstance(content, list):
        return [(f"{place}.{at}", part) for at, part in enumerate(content)]
    return [(place, content)] if isinstance(content, Mapping) and _kind(content) in _MEDIA else None


def is_text(part: Any) -> bool:
    """Return whether a part is a text part in any of the supported APIs' formats."""
    return isinstance(part, str) or _kind(part) in _TEXT_FIELDS or _document(part) is not None


def _document(part: Any, *, may_omit: bool = False) -> str | None:
    """Return the text of Anthropic's documents and search results, or None for other parts.

    It begins with the title, and the document's context or the search result's address. Malformed texts are
    kept as JSON. Documents can also be PDF files or links, which are not text.

    Args:
        part: The part.
        may_omit: Whether to replace images in a document with notes. If not, such a document is not text.
    """
    kind, source = _kind(part), _field(part, "source")
    if kind == "search_result":
        content, heading = _field(part, "content"), [_field(part, "title"), source]
    elif kind == "document":
        name = {"text": "data", "content": "content"}.get(str(_field(source, "type")), "")
        content, heading = _field(source, name), [_field(part, "title"), _field(part, "context")]
        if content is None:
            return None
    else:
        return None
    body = content if isinstance(content, list) else [content]
    if kind == "document" and not may_omit and any(_kind(each) in _MEDIA for each in body):
        return None
    return "\n".join(filter(None, (_any_text(each) for each in (*heading, *body) if each is not None)))


def _any_text(part: Any) -> str:
    """Return the text of a part, a note if it is an image or a file, or the part as JSON if it is neither."""
    if isinstance(part, str):
        return part
    if (document := _document(part, may_omit=True)) is not None:
        return document
    kind = _kind(part)
    if kind in _MEDIA:
        return f"[{kind} omitted: text only]"
    text = _field(part, _TEXT_FIELDS.get(kind, ""))
    return text if isinstance(text, str) else json.dumps(_without_data(part), ensure_ascii=False)


def _without_data(value: Any) -> Any:
    """Return a part as JSON-compatible objects, without the fields that hold encoded files."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {name: _without_data(each) for name, each in value.items() if name not in _DATA_FIELDS}
    return [_without_data(each) for each in value] if isinstance(value, list) else value


def _kind(part: Any) -> str:
    return str(_field(part, "type") or "text")[:40]


def part_text(place: str, part: Any) -> str:
    """Return the text of a part. Raises ApiError if the part is not text, or if its text is missing."""
    if isinstance(part, str):
        return part
    kind = _kind(part)
    if (document := _document(part)) is not None:
        return document
    if kind not in _TEXT_FIELDS:
        raise unsupported_content(kind, param=place)
    text = _field(part, _TEXT_FIELDS[kind])
    if not isinstance(text, str):
        missing = f"{place}.{_TEXT_FIELDS[kind]}"
        raise invalid_request(f"{missing} is missing; add this field", param=missing, code="missing_field")
    return text


def reasoning_of(part: Any) -> str | None:
    """Return the text of a reasoning part, or None for any other part."""
    fields = _REASONING_FIELDS.get(_kind(part))
    if fields is None:
        return None
    return next((text for name in fields if isinstance(text := _field(part, name), str)), "")


def _field(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
