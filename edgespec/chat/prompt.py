"""Build prompts from messages and tools, and truncate conversations that exceed the context."""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal

from edgespec.chat.message import Message, PlacedImage, with_system
from edgespec.chat.reasoning import opening_marker, split_at_markers
from edgespec.chat.reply_start import fitted_to_prompt, whole_characters
from edgespec.chat.template import DEFAULT_SETTINGS, ChatTemplate, TemplateSettings
from edgespec.chat.tokenizing import (
    ControlTokenEscaping,
    TextScanner,
    check_size,
    is_control,
    literal,
    tokenize,
    tokenize_whole,
)
from edgespec.chat.tool_calls.grammar import AnswerRule, tool_grammar
from edgespec.chat.tool_calls.parser import CallSyntax
from edgespec.chat.tool_calls.tool_set import ToolSet, render_with_tools
from edgespec.errors import ContextFullError, OptionError, TemplateError
from edgespec.model.base import Progress, Vocabulary
from edgespec.model.image import Image
from edgespec.model.image_tokens import PreparedImage, contains_image

__all__ = ["ContextFull", "PromptBuilder", "RenderedPrompt", "build_single_prompt", "check_context_full"]


def build_single_prompt(
    vocabulary: Vocabulary,
    template: ChatTemplate | None,
    message: str,
    system: str | None,
    context_tokens: int,
    progress: Progress | None = None,
    settings: TemplateSettings = DEFAULT_SETTINGS,
    images: Sequence[Image] = (),
    prepare_image: Callable[[Image], PreparedImage] | None = None,
) -> RenderedPrompt:
    """Build the prompt for a reply to a single user message.

    Args:
        vocabulary: The target's tokenizer.
        template: The chat template. If None, the message is continued verbatim.
        message: The user's message.
        system: The system prompt, which requires a template.
        context_tokens: Size of the context.
        progress: Called while the prompt is tokenized. Returning False cancels the call.
        settings: The chat template's other inputs.
        images: Images that precede the message.
        prepare_image: Returns the tokens of an image. See `LanguageModel.prepare_image`.

    Raises:
        AttachmentError, CapabilityError: The model cannot use an image.
        ContextFullError: The message is too long for the context.
        OptionError: The message or the system prompt is not a string.
        TemplateError: The template is broken, or there is a system prompt but no template.
    """
    if not isinstance(message, str):
        raise OptionError(f"the prompt must be a string, not {type(message).__name__}", "pass a string")
    if not isinstance(system, str | None):
        raise OptionError(
            f"the system prompt must be a string, not {type(system).__name__}", "pass a string or None"
        )
    if template is not None:
        user = Message("user", message, images=tuple(map(PlacedImage, images)))
        messages = with_system(system, [user])
        check_size(vocabulary, [each.content for each in messages], context_tokens)
        builder = PromptBuilder(template, vocabulary, prepare_image=prepare_image)
        return builder.build(messages, progress, settings)
    if system:
        raise TemplateError(
            "a system prompt requires a chat template",
            "omit --system or --raw, or use an instruct model",
            code="template_missing",
        )
    check_size(vocabulary, [message], context_tokens)
    if not images or prepare_image is None:
        return RenderedPrompt(message, tokenize_whole(vocabulary, message, progress))
    prepared = tuple(map(prepare_image, images))
    tokens = vocabulary.tokenize("", special=True, start=True)
    tokens += [token for image in prepared for token in image.tokens]
    tokens += tokenize(vocabulary, message, special=True, start=False, progress=progress)
    return RenderedPrompt(message, tokens, images=prepared)


ContextFull = Literal["slide", "refuse"]

# Number of context tokens reserved for the reply, but at most a quarter of the context.
_REPLY_TOKENS = 512
# Maximum size of a control token's text in bytes.
_MAX_CONTROL_TOKEN_BYTES = 512
_REMEMBERED_CONVERSATIONS = 8
_REMEMBERED_IMAGES = 16


def check_context_full(context_full: str) -> None:
    """Raise OptionError unless `context_full` is `slide` or `refuse`."""
    if context_full not in ("slide", "refuse"):
        raise OptionError(
            f"context_full must be `slide` or `refuse`, not {context_full!r}",
            "use `slide` to drop the oldest messages when the context is full, or `refuse` to raise an error",
        )


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text and as tokens.

    Attributes:
        text: The output of the chat template.
        tokens: The token ids of that text.
        dropped_messages: Number of old messages left out because the context is full. The system prompt is
            never dropped and does not count.
        reply_start: When a reply is continued, the text at the end of the prompt that belongs to it.
        images: The images in the prompt. The model can process the tokens only while these objects exist.
        syntax: The format in which the model writes tool calls. None without tools.
        grammar: The grammar that the reply must match because of its tools. None if they do not constrain it.
    """

    text: str
    tokens: list[int]
    dropped_messages: int = 0
    reply_start: str = ""
    images: tuple[PreparedImage, ...] = ()
    syntax: CallSyntax | None = None
    grammar: str | None = None


class PromptBuilder:
    """Renders and tokenizes conversations for one model.

    Retokenizing a reply often yields tokens that differ from the sampled ones. The builder therefore
    remembers the exact tokens of recent conversations and extends them, so that the KV cache can be reused.

    `build_reply`, `count_tokens` and `remember` can be called from any thread. Call the other methods only
    while no other thread uses the builder.

    Args:
        template: The model's chat template.
        vocabulary: The model's tokenizer.
        cached_prefixes: Returns the token sequences in the prefix cache, so that a resumed conversation can
            reuse them.
        prepare_image: Returns the tokens of an image. See `LanguageModel.prepare_image`.
    """

    def __init__(
        self,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        cached_prefixes: Callable[[], Iterable[Sequence[int]]] = tuple,
        prepare_image: Callable[[Image], PreparedImage] | None = None,
    ) -> None:
        self.template = template
        self._vocabulary = vocabulary
        self._prepare_image = prepare_image
        # The images of recent prompts, keyed by a hash of their content.
        self._images: dict[str, PreparedImage] = {}
        self._cached_prefixes = cached_prefixes
        self._scanner = TextScanner(vocabulary)
        self._added_tokens: int | None = None
        # Recent prompts, newest last. Each is stored with and without its reply, because regenerating a reply
        # requires the prompt alone.
        self._remembered: deque[RenderedPrompt] = deque(maxlen=2 * _REMEMBERED_CONVERSATIONS)
        # Reentrant, because garbage collection during `build_reply` can end an abandoned reply, which calls
        # `remember`.
        self._lock = threading.RLock()

    def build_reply(
        self,
        messages: Sequence[Message],
        context_tokens: int,
        context_full: ContextFull,
        tools: ToolSet,
        settings: TemplateSettings,
        reply_start: str = "",
        progress: Progress | None = None,
        answer: AnswerRule | None = None,
    ) -> RenderedPrompt:
        """Return the prompt for the reply to a conversation, and how its tool calls are written.

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
            OptionError: No grammar can express the schema of a tool.
            TemplateError: The chat template is broken or rejects the messages.
        """
        messages = [message.with_files_as_text() for message in messages]
        with self._lock:
            syntax = grammar = None
            if tools.definitions:
                form = self.template.call_form
                syntax = CallSyntax(
                    form,
                    tools.schemas,
                    f"call_{secrets.token_hex(8)}",
                    calls_or_answer=answer is not None and answer.is_json,
                    single=tools.single,
                )
                grammar = tool_grammar(form, tools, self._vocabulary, answer)
            if reply_start:
                prompt = self.build_continued(
                    messages, context_tokens, context_full, reply_start, progress, settings
                )
            else:
                prompt = self.build_fitting(messages, context_tokens, context_full, progress, settings)
        return replace(prompt, syntax=syntax, grammar=grammar) if syntax else prompt

    def build(
        self,
        messages: Sequence[Message],
        progress: Progress | None = None,
        settings: TemplateSettings = DEFAULT_SETTINGS,
    ) -> RenderedPrompt:
        """Return the prompt for the assistant's next reply.

        Args:
            messages: The conversation.
            progress: Called repeatedly. Returning False cancels the call.
            settings: The chat template's other inputs, such as tools.

        Raises:
            CancelledError: `progress` returned False.
            TemplateError: The chat template is broken or rejects the messages.
        """
        escaping = ControlTokenEscaping(self._vocabulary, messages, settings.tools)
        images: list[PreparedImage] = []

        def mark(image: Image) -> str:
            images.append(self._prepared(image))
            return escaping.image_mark(image.digest.hex())

        escaped = [
            escaping.escape(message.with_marked_images(mark), self._scanner, progress) for message in messages
        ]
        if settings.tools:
            text = render_with_tools(
                lambda tools: self.template.render(escaped, progress, replace(settings, tools=tools)),
                escaping.escape_tools(settings.tools, self._scanner, progress),
            )
        else:
            text = self.template.render(escaped, progress, settings)
        prompt = self._tokenized(text, escaping, progress)
        while len(self._images) > max(_REMEMBERED_IMAGES, len(images)):
            del self._images[next(iter(self._images))]
        return replace(prompt, images=tuple(images)) if images else prompt

    def _tokenized(
        self, text: str, escaping: ControlTokenEscaping, progress: Progress | None
    ) -> RenderedPrompt:
        """Tokenize the output of the chat template, reusing the tokens of an earlier prompt."""
        # Iterate over a copy, because another thread may append to the deque.
        remembered = [prefix for prefix in tuple(self._remembered) if text.startswith(prefix.text)]
        longest = max(remembered, key=lambda prefix: len(prefix.text), default=None)
        prefix = longest or self._cached_prefix(text, escaping)
        if prefix:
            if len(prefix.text) == len(text):
                return RenderedPrompt(text, list(prefix.tokens))
            rest = self._tokenize(text[len(prefix.text) :], escaping, False, progress)
            # Append tokens only if the first one is a control token, because other tokens could merge with
            # the text before them.
            if rest and not contains_image(rest[:1]) and self._vocabulary.piece(rest[0]) == b"":
                return RenderedPrompt(text, prefix.tokens + rest)
        start = not (self._vocabulary.bos_text and text.startswith(self._vocabulary.bos_text))
        return RenderedPrompt(text, self._tokenize(text, escaping, start, progress))

    def _prepared(self, image: Image) -> PreparedImage:
        """Prepare an image, or reuse the result from an earlier prompt."""
        assert self._prepare_image is not None
        name = image.digest.hex()
        prepared = self._images.pop(name, None) or self._prepare_image(image)
        self._images[name] = prepared
        return prepared

    def count_tokens(
        self,
        messages: Sequence[Message],
        context_tokens: int,
        settings: TemplateSettings = DEFAULT_SETTINGS,
    ) -> int:
        """Return the number of tokens in the prompt, or an estimate if it exceeds the context."""
        messages = [message.with_files_as_text() for message in messages]
        with self._lock:
            estimate = sum(self._estimated_tokens(message, context_tokens, None) for message in messages)
            return estimate if estimate > context_tokens else len(self.build(messages, None, settings).tokens)

    def build_continued(
        self,
        messages: Sequence[Message],
        context_tokens: int,
        context_full: ContextFull,
        reply_start: str,
        progress: Progress | None = None,
        settings: TemplateSettings = DEFAULT_SETTINGS,
    ) -> RenderedPrompt:
        """Return the prompt followed by the partial reply that the model should continue.

        Reuses the tokens that the model generated, if they are still known. Takes the arguments of
        `build_fitting` and raises the same exceptions.
        """
        reply_start = whole_characters(reply_start)
        start_tokens = self._reply_tokens(reply_start)
        try:
            fitting_tokens = context_tokens - len(start_tokens)
            prompt = self.build_fitting(messages, fitting_tokens, context_full, progress, settings)
        except ContextFullError as error:
            raise ContextFullError(
                f"cannot continue the reply: its {len(start_tokens):,} tokens and the messages before it"
                f" exceed the context of {context_tokens:,} tokens",
                "start a new chat, or load the model with a larger --context",
                prompt_tokens=(error.prompt_tokens or 0) + len(start_tokens),
                context_tokens=context_tokens,
            ) from error
        opening = opening_marker(prompt.text)
        fitted = fitted_to_prompt(reply_start, prompt.text, self.template.source) if reply_start else ""
        if fitted != reply_start:
            reply_start, start_tokens = fitted, self._reply_tokens(fitted)
        text = prompt.text + reply_start
        remembered = next((each.tokens for each in self._remembered if each.text == text), None)
        tokens = list(remembered or prompt.tokens + start_tokens)
        return replace(prompt, text=text, tokens=tokens, reply_start=opening + reply_start)

    def _reply_tokens(self, text: str) -> list[int]:
        """Return tokens that decode to exactly `text`, as the model would generate them in a reply."""
        tokens: list[int] = []
        plain = ""
        for part, is_marker in split_at_markers(text):
            marker = self._vocabulary.tokenize(part, special=True, start=False) if is_marker else []
            if len(marker) == 1 and is_control(self._vocabulary, marker[0]):
                tokens += self._plain_tokens(plain) + marker
                plain = ""
            else:
                plain += part
        return tokens + self._plain_tokens(plain)

    def _plain_tokens(self, text: str) -> list[int]:
        """Return tokens that decode to exactly `text`, without control tokens."""
        vocabulary, spelled = self._vocabulary, text.encode("utf-8", "replace")
        # Some tokenizers prepend a space, so try variants of the text until the tokens decode to it exactly.
        for anchored in (text, text.removeprefix(" "), f"\n{text}"):
            tokens = vocabulary.tokenize(anchored, special=False, start=False)
            for first in range(3):
                if b"".join(map(vocabulary.piece, tokens[first:])) == spelled:
                    return tokens[first:]
        return vocabulary.tokenize(text, special=False, start=False)

    def build_fitting(
        self,
        messages: Sequence[Message],
        context_tokens: int,
        context_full: ContextFull,
        progress: Progress | None = None,
        settings: TemplateSettings = DEFAULT_SETTINGS,
    ) -> RenderedPrompt:
        """Return the prompt, dropping the oldest messages if they leave too little room for a reply.

        With `context_full="slide"`, the oldest turns are dropped in steps of half a context. Between steps,
        each prompt extends the previous one, so the KV cache can be reused.

        Args:
            messages: The conversation, from the system prompt, if there is one, to the last user message.
            context_tokens: The context size.
            context_full: `slide` drops the oldest turns, `refuse` raises ContextFullError.
            progress: Called repeatedly. Returning False cancels the call.
            settings: The chat template's other inputs, such as tools.

        Raises:
            CancelledError: `progress` returned False.
            ContextFullError: The last message alone does not fit, or the conversation does not fit and
                `context_full` is `refuse`.
            TemplateError: The chat template is broken or rejects the messages.
        """
        if all(message.role == "system" for message in messages):
            context_full = "refuse"  # There are no turns to drop.
        first_turn = 1 if messages[0].role == "system" else 0
        never_dropped = messages if context_full == "refuse" else [*messages[:first_turn], messages[-1]]
        texts = [text for message in never_dropped for text in message.prompt_texts if text]
        check_size(self._vocabulary, texts, context_tokens)
        limit_tokens = context_tokens - min(_REPLY_TOKENS, context_tokens // 4)
        estimates = [self._estimated_tokens(message, context_tokens, progress) for message in messages]
        prompt = None
        if context_full == "refuse" or sum(estimates) <= limit_tokens:
            prompt = self.build(messages, progress, settings)
            if context_full == "refuse" and len(prompt.tokens) > limit_tokens:
                kept = f", of which {context_tokens - limit_tokens} are reserved for the reply"
                raise ContextFullError(
                    f"the prompt has {len(prompt.tokens):,} tokens, but the context holds only"
                    f" {context_tokens:,}" + (kept if len(prompt.tokens) <= context_tokens else ""),
                    "shorten it, use context_full='slide' to drop the oldest messages, or load the model with"
                    " a larger --context",
                    prompt_tokens=len(prompt.tokens),
                    context_tokens=context_tokens,
                )
        if prompt is None or len(prompt.tokens) > limit_tokens:
            step_tokens = max(1, context_tokens // 2)
            build = partial(self.build, progress=progress, settings=settings)
            prompt = _build_shorter(messages, estimates, limit_tokens, step_tokens, build)
        if len(prompt.tokens) >= context_tokens:
            shortened = "shorten it or use fewer tools," if settings.tools else "shorten it"
            others = _others(bool(first_turn), bool(settings.tools))
            wanted_tokens = (len(prompt.tokens) + _REPLY_TOKENS) // 256 * 256 + 256
            raise ContextFullError(
                f"the message{others} has {len(prompt.tokens):,} tokens, but the context holds only"
                f" {context_tokens:,}",
                f"{shortened} or use --context {wanted_tokens}",
                prompt_tokens=len(prompt.tokens),
                context_tokens=context_tokens,
                wanted_tokens=wanted_tokens,
            )
        return prompt

    def _estimated_tokens(self, message: Message, context_tokens: int, progress: Progress | None) -> int:
        """Estimate how many tokens a message adds to the prompt.

        Reasoning is not counted, because most templates drop it.
        """
        content = "\n".join(filter(None, message.prompt_texts))
        # Do not tokenize a message that is certain to exceed the context.
        least = self._vocabulary.min_tokens(content) if len(content) > context_tokens else 0
        if least <= context_tokens:
            least = self._scanner.scan(content, progress).token_count
        least += sum(len(self._prepared(each.image).tokens) for each in message.images)
        return least + self._tokens_around_message(progress)

    def _tokens_around_message(self, progress: Progress | None) -> int:
        """Estimate how many tokens the template adds around each message."""
        if self._added_tokens is None:
            turn = [Message("user", "a"), Message("assistant", "b")]
            try:
                short, long = (len(self.build([*turn * count, turn[0]], progress).tokens) for count in (1, 2))
                self._added_tokens = max(0, (long - short) // len(turn) - 1)
            except TemplateError:
                self._added_tokens = 0
        return self._added_tokens

    def remember(self, prompt: RenderedPrompt, reply_tokens: Sequence[int]) -> None:
        """Remember that the model generated `reply_tokens` after `prompt`, for later prompts of the chat."""
        tokens = list(reply_tokens)
        if tokens and self._vocabulary.is_end(tokens[-1]):
            tokens.pop()
        # Include control tokens such as `<think>`, because chat templates render them as text.
        pieces = (self._vocabulary.piece(token) or self._vocabulary.raw_piece(token) for token in tokens)
        text = b"".join(pieces).decode("utf-8", "replace")
        with self._lock:
            self._remembered.append(RenderedPrompt(prompt.text, prompt.tokens))
            self._remembered.append(RenderedPrompt(prompt.text + text, prompt.tokens + tokens))

    def _cached_prefix(self, text: str, escaping: ControlTokenEscaping) -> RenderedPrompt | None:
        """Return the longest prefix of `text` in the prefix cache that ends before a control token."""
        encoded = text.encode("utf-8", "replace")
        marks = self._image_marks(text, escaping)
        prefixes = (self._spelled_prefix(tokens, encoded, marks) for tokens in self._cached_prefixes())
        longest = max(prefixes, key=lambda prefix: len(prefix.text), default=None)
        return longest if longest and longest.text else None

    def _image_marks(self, text: str, escaping: ControlTokenEscaping) -> dict[int, tuple[bytes, list[int]]]:
        """Return the marker and the tokens of each image in `text`, keyed by the marker's byte offset."""
        marks: dict[int, tuple[bytes, list[int]]] = {}
        if not self._images:
            return marks
        at = 0
        for number, part in enumerate(escaping.split_at_images(text)):
            written = (escaping.image_mark(part) if number % 2 else part).encode("utf-8", "replace")
            if number % 2:
                marks[at] = written, list(self._images[part].tokens)
            at += len(written)
        return marks

    def _spelled_prefix(
        self, tokens: Sequence[int], encoded: bytes, marks: Mapping[int, tuple[bytes, list[int]]]
    ) -> RenderedPrompt:
        at = spelled_bytes = spelled_tokens = after_image = 0
        for i, token in enumerate(tokens):
            if i < after_image:
                continue
            if at in marks:
                mark, image_tokens = marks[at]
                if list(tokens[i : i + len(image_tokens)]) != image_tokens:
                    break
                at, after_image = at + len(mark), i + len(image_tokens)
                continue
            if contains_image((token,)):
                break
            control = is_control(self._vocabulary, token)
            piece = self._vocabulary.raw_piece(token) if control else self._vocabulary.piece(token)
            if not encoded.startswith(piece, at):
                if i == 0 and control:
                    # Skip the start token, which the tokenizer adds and chat templates do not render.
                    continue
                break
            if control:
                spelled_bytes, spelled_tokens = at, i
            at += len(piece)
        else:
            following = encoded[at : at + _MAX_CONTROL_TOKEN_BYTES].decode("utf-8", "replace")
            rest = self._vocabulary.tokenize(following, special=True, start=False)
            if rest and is_control(self._vocabulary, rest[0]):
                spelled_bytes, spelled_tokens = at, len(tokens)
        spelled_text = encoded[:spelled_bytes].decode("utf-8", "replace")
        return RenderedPrompt(spelled_text, list(tokens[:spelled_tokens]))

    def _tokenize(
        self, text: str, escaping: ControlTokenEscaping, start: bool, progress: Progress | None
    ) -> list[int]:
        tokens: list[int] = []
        for number, part in enumerate(escaping.split_at_images(text)):
            if number % 2:
                tokens += self._images[part].tokens
            elif part or number == 0:
                tokens += self._tokenize_text(part, escaping, start and number == 0, progress)
        return tokens

    def _tokenize_text(
        self, text: str, escaping: ControlTokenEscaping, start: bool, progress: Progress | None
    ) -> list[int]:
        vocabulary = self._vocabulary
        plain = partial(tokenize, vocabulary, special=False, start=False, progress=progress)
        tokens = tokenize(vocabulary, text, special=True, start=start, progress=progress)
        if not escaping.literals:
            return tokens
        # Keep the template's control tokens. Tokenize the user's text between them as plain text.
        control_tokens, tokens = [token for token in tokens if is_control(vocabulary, token)], []
        at = 0
        for token in control_tokens:
            spelling = literal(vocabulary, token)
            begin = text.find(spelling, at)
            if begin < 0:
                tokens.append(token)
                continue
            if begin > at:
                tokens += plain(escaping.unescape(text[at:begin]))
            tokens.append(token)
            at = begin + len(spelling)
        if at < len(text):
            tokens += plain(escaping.unescape(text[at:]))
        return tokens


def _build_shorter(
    messages: Sequence[Message],
    estimates: Sequence[int],
    limit_tokens: int,
    step_tokens: int,
    build: Callable[[Sequence[Message]], RenderedPrompt],
) -> RenderedPrompt:
    """Drop the oldest turns until the prompt has at most `limit_tokens`, if possible.

    Drops about `step_tokens` tokens at a time, so that most prompts extend the previous one and can reuse its
    KV cache.
    """
    system = [message for message in messages[:1] if message.role == "system"]
    turns = messages[len(system) :]
    starts = [place for place, message in enumerate(turns) if message.role == "user"]
    tokens_before = [0, *accumulate(estimates[len(system) :])]
    steps = max(1, -(-(sum(estimates) - limit_tokens) // step_tokens))
    prompt = None
    while prompt is None or len(prompt.tokens) > limit_tokens:
        first = bisect_left(starts[:-1], steps * step_tokens, key=tokens_before.__getitem__)
        start = starts[first]
        if prompt is None or start != prompt.dropped_messages:
            shorter = build([*system, *turns[start:]])
            prompt = replace(shorter, dropped_messages=start)
        if start == starts[-1]:
            break
        steps += 1
    return prompt


def _others(system_prompt: bool, tools: bool) -> str:
    """Name the parts of the prompt other than the last message, for an error message."""
    others = [*(["the system prompt"] if system_prompt else []), *(["the tools"] if tools else [])]
    return f", together with {' and '.join(others)}," if others else ""
