"""Build the prompt of a reply to a single message, with or without the chat template."""

from __future__ import annotations

from edgespec.backends.base import Progress, Vocabulary
from edgespec.chat.message import Message
from edgespec.chat.prompt import PromptBuilder, RenderedPrompt
from edgespec.chat.template import DEFAULT_SETTINGS, ChatTemplate, TemplateSettings
from edgespec.chat.tokenizing import check_size, tokenize
from edgespec.errors import OptionError, TemplateError

__all__ = ["build_single_prompt"]


def build_single_prompt(
    vocabulary: Vocabulary,
    template: ChatTemplate | None,
    message: str,
    system: str | None,
    context_tokens: int,
    progress: Progress | None = None,
    settings: TemplateSettings = DEFAULT_SETTINGS,
) -> RenderedPrompt:
    """Build the prompt for a reply to a single user message.

    Args:
        vocabulary: The target's tokenizer.
        template: The chat template. None continues the message verbatim.
        message: The user's message.
        system: The system prompt, which requires a template.
        context_tokens: Size of the context.
        progress: Called while the prompt is tokenized. Returning False cancels the call.
        settings: The chat template's inputs besides the message.

    Raises:
        ContextFullError: The message is too long for the context.
        OptionError: The message is not a string.
        TemplateError: The template is broken, or there is a system prompt but no template.
    """
    if not isinstance(message, str):
        raise OptionError(f"the prompt must be a string, not {type(message).__name__}", "pass a string")
    if template is not None:
        messages = [*([Message("system", system)] if system else []), Message("user", message)]
        check_size(vocabulary, [each.content for each in messages], context_tokens)
        return PromptBuilder(template, vocabulary).build(messages, progress, settings)
    if system:
        raise TemplateError(
            "a system prompt requires the model's chat template",
            "omit --system or --raw, or use an instruct model",
        )
    check_size(vocabulary, [message], context_tokens)
    return RenderedPrompt(message, tokenize(vocabulary, message, special=True, start=True, progress=progress))
