"""Handle `POST /api/generate`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NotRequired

from pydantic import Field
from starlette.responses import Response

from edgespec.server.errors import invalid_request
from edgespec.server.generation import ChatPrompt, ReplyRequest, TextPrompt
from edgespec.server.ollama.fields import OllamaFields, options_of, read_images
from edgespec.server.ollama.replying import OllamaPart, OllamaReply, load_model, respond
from edgespec.server.protocol import Call

__all__ = ["OllamaGenerateRequest", "OllamaGeneration", "generate"]

_UNSUPPORTED = {
    "suffix": "edgespec cannot fill in text before a suffix; leave suffix out",
    "template": "edgespec uses the chat template of the model; leave template out, or use raw: true",
    "context": "edgespec does not return Ollama's context; send the whole conversation to /api/chat instead",
}


class OllamaGenerateRequest(OllamaFields):
    """The body of a generate request. Without a prompt, it loads the model."""

    advice = MappingProxyType(
        {
            "messages": "use prompt, or POST /api/chat",
            "tools": "only chats have tools, so POST /api/chat",
        }
    )

    prompt: str | None = Field(default=None, description="The question, or with raw the text to continue.")
    system: str | None = Field(default=None, description="The system prompt.")
    raw: bool | None = Field(default=None, description="Continue the prompt without the chat template.")
    images: list[str] | None = Field(default=None, description="Images before the prompt, in base64.")
    # Ollama's client always sends these two fields, usually empty.
    suffix: str | None = Field(default=None, description="Must be empty.")
    template: str | None = Field(default=None, description="Must be empty.")
    context: list[int] | None = Field(default=None, description="Must be empty.")


class OllamaGeneration(OllamaReply):
    """The response to a generate request."""

    response: str
    thinking: NotRequired[str]


async def generate(call: Call[OllamaGenerateRequest]) -> Response:
    """Reply to a prompt, or continue it."""
    body = call.body
    for name, message in _UNSUPPORTED.items():
        if getattr(body, name):
            raise invalid_request(message, param=name)
    if body.raw and body.system:
        raise invalid_request(
            "raw continues the prompt verbatim, without a system prompt; leave out raw or system",
            param="system",
            code="option_conflict",
        )
    if not body.prompt:
        return await load_model(call, _formatted)
    return await respond(call, ReplyRequest(_prompt(body, body.prompt), options_of(body)), _formatted)


def _prompt(body: OllamaGenerateRequest, prompt: str) -> ChatPrompt | TextPrompt:
    images = read_images(body.images, "images")
    if body.raw:
        return TextPrompt(prompt, tuple(each.image for each in images))
    system = [{"role": "system", "content": body.system}] if body.system else []
    return ChatPrompt([*system, {"role": "user", "content": prompt, "images": images}])


def _formatted(part: OllamaPart) -> dict[str, Any]:
    return {"response": part.text, **({"thinking": part.thinking} if part.thinking else {})}
