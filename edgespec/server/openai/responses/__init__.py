"""OpenAI's Responses API: `POST /v1/responses`."""

from edgespec.server.openai.responses.create import create_response
from edgespec.server.openai.responses.fields import ResponsesRequest
from edgespec.server.openai.responses.response import ResponseObject

__all__ = ["ResponseObject", "ResponsesRequest", "create_response"]
