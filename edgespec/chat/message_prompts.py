"""Build prompts from messages and tools, along with grammars that keep the reply's tool calls valid."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from edgespec.chat.message import Message
from edgespec.chat.prompt import ContextFull, PromptBuilder, RenderedPrompt
from edgespec.chat.template import ChatTemplate, TemplateSettings
from edgespec.chat.tool_calls.grammar import AnswerRule, tool_grammar
from edgespec.chat.tool_calls.parser import CallSyntax
from edgespec.chat.tool_calls.tool_set import ToolSet
from edgespec.errors import TemplateError
from edgespec.model.base import Progress, Vocabulary
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage

__all__ = ["MessagePrompt", "MessagePrompts"]


class MessagePrompt(NamedTuple):
    """A prompt built from messages and tools.

    Attributes:
        rendered: The prompt as text and as tokens.
        syntax: The model's tool-call format. None without tools.
        grammar: The grammar that the reply must match. None if the reply is unconstrained.
    """

    rendered: RenderedPrompt
    syntax: CallSyntax | None
    grammar: str | None


class MessagePrompts:
    """Thread-safe prompt builder for one model. See also `PromptBuilder`, which is not thread-safe.

    Args:
        vocabulary: The model's tokenizer.
        template: The model's chat template. If None, all methods except `close` raise TemplateError.
        cached_prefixes: Returns the token sequences in the prefix cache.
        other_template: Whether Ollama has its own template for the model, in a format that edgespec
            cannot use.
        model_name: The model's name, for error messages.
        prepare_image: Returns the tokens of an image. See `LanguageModel.prepare_image`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate | None,
        cached_prefixes: Callable[[], Iterable[Sequence[int]]],
        other_template: bool = False,
        model_name: str = "this model",
        prepare_image: Callable[[Image], PreparedImage] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._prepare_image = prepare_image
        self.template = template
        self._cached_prefixes = cached_prefixes
        self._other_template, self._model_name = other_template, model_name
        self._builder: PromptBuilder | None = None
        # Reentrant, because garbage collection during `build` can end an abandoned reply, which calls
        # `remember`.
        self._lock = threading.RLock()

    def build(
        self,
        messages: Sequence[Message],
        context_tokens: int,
        context_full: ContextFull,
        tools: ToolSet,
        settings: TemplateSettings,
        reply_start: str = "",
        progress: Progress | None = None,
        answer: AnswerRule | None = None,
    ) -> MessagePrompt:
        """Return the prompt for the reply to a conversation.

        Args:
            messages: The conversation.
            context_tokens: The context size.
            context_full: `slide` drops the oldest turns, `refuse` raises ContextFullError.
            tools: The tools that the model can call.
            settings: The chat template's other inputs, including the definitions of `tools`.
            reply_start: Text that the reply begins with.
            progress: Called repeatedly. Returning False cancels the call.
            answer: The constraint on the answer, for requests with tools.

        Raises:
            CancelledError: `progress` returned False.
            ContextFullError: The conversation does not fit in the context.
            OptionError: `context_full` is invalid, or no grammar can express the schema of a tool.
            TemplateError: The model has no chat template, or the template rejects the messages.
        """
        messages = [message.with_files_as_text() for message in messages]
        with self._lock:
            builder = self._prompt_builder()
            syntax = grammar = None
            if tools.definitions:
                form = builder.template.call_form
                syntax = CallSyntax(
                    form,
                    tools.schemas,
                    f"call_{secrets.token_hex(8)}",
                    calls_or_answer=answer is not None and answer.is_json,
                    single=tools.single,
                )
                grammar = tool_grammar(form, tools, self._vocabulary, answer)
            if reply_start:
                rendered = builder.build_continued(
                    messages, context_tokens, context_full, reply_start, progress, settings
                )
            else:
                rendered = builder.build_fitting(messages, context_tokens, context_full, progress, settings)
        return MessagePrompt(rendered, syntax, grammar)

    def remember(self, prompt: RenderedPrompt, reply_tokens: Sequence[int]) -> None:
        """Remember the tokens generated after a prompt, for reuse in later prompts of the conversation."""
        with self._lock:
            self._prompt_builder().remember(prompt, reply_tokens)

    def count_tokens(
        self, messages: Sequence[Message], context_tokens: int, settings: TemplateSettings
    ) -> int:
        """Return the number of tokens in the prompt, or an estimate if it exceeds the context."""
        messages = [message.with_files_as_text() for message in messages]
        with self._lock:
            return self._prompt_builder().count_tokens(messages, context_tokens, settings)

    def no_template(self) -> TemplateError:
        """Return the error for using messages with a model that has no chat template."""
        hint = "continue plain text with `edgespec generate --raw`, or with /v1/completions of a server"
        if self._other_template:
            return TemplateError(
                f"{self._model_name} has no chat template: its GGUF file has none, and edgespec does not"
                " support the Go template in Ollama's manifest",
                f"use a GGUF file with a chat template, for example from Hugging Face, or {hint}",
                code="template_missing",
            )
        return TemplateError(
            f"{self._model_name} has no chat template",
            f"choose an instruct model, or {hint}",
            code="template_missing",
        )

    def check_template(self) -> None:
        """Raise TemplateError if the chat template is missing or broken."""
        self._prompt_builder().template.compile()

    def close(self) -> None:
        """Stop the chat template's process."""
        if self.template:
            self.template.close()

    def _prompt_builder(self) -> PromptBuilder:
        if self.template is None:
            raise self.no_template()
        if self._builder is None:
            self._builder = PromptBuilder(
                self.template, self._vocabulary, self._cached_prefixes, self._prepare_image
            )
        return self._builder
