"""Generate training conversations with the target, save them, and arrange them into training steps.

The target also generates the questions (Magpie, arXiv 2406.08464), unless they are read from a file or from
the user's saved chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgespec.chat.message import Message, with_system
from edgespec.chat.prompt import PromptBuilder
from edgespec.chat.saved_chat import read_chat
from edgespec.chat.store import ChatStore
from edgespec.chat.template import ChatTemplate
from edgespec.errors import ChatFileError, EdgespecError, ModelFileError, OptionError, TemplateError
from edgespec.losslessness.cases import read_prompts
from edgespec.methods.auto.drafter_stats import text_kind
from edgespec.model.base import Progress
from edgespec.model.drafter_training import TrainingBatch, Writer
from edgespec.system.files import replace_when_written

__all__ = [
    "BATCH_CONVERSATIONS",
    "BATCH_TOKENS",
    "PASSES",
    "Conversation",
    "ConversationWriter",
    "TrainingPrompt",
    "batch_of",
    "batches",
    "chat_prompts",
    "file_prompts",
    "read_conversations",
    "save_conversations",
    "step_tokens",
    "token_counts",
    "training_steps",
]

# Number of conversations per batch. Larger batches are faster, but each conversation needs a KV cache.
BATCH_CONVERSATIONS = 32
_MAX_QUESTION_TOKENS, _MAX_REPLY_TOKENS = 200, 160
# Maximum prompt length in tokens. Longer prompts are skipped, because they slow down training without adding
# reply tokens.
_MAX_PROMPT_TOKENS = 800
# Temperatures for questions and replies. Questions are always sampled. Two thirds of the replies are greedy
# and one third is sampled, so that the drafter sees both kinds of text.
_QUESTION_TEMPERATURE = 1.0
_REPLY_TEMPERATURES = (0.0, 0.0, 0.8)
# Placeholder for the user's message, chosen so that no chat template contains it.
_MARKER = "edgespec-7f3a"
# Maximum number of tokens per training step. Larger batches need more memory for the target's logits.
BATCH_TOKENS = 1_536
# With few conversations, batches are made smaller to get about 1,500 steps, but no smaller than 256 tokens,
# which is about one conversation.
_WANTED_STEPS, _MIN_BATCH_TOKENS = 1_500, 256
# Number of epochs. With more, heads overfit and become worse on other text.
PASSES = 3


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """Messages for the target to answer. The last message is from the user.

    Attributes:
        messages: The messages, oldest first.
        kind: Kind of text, such as `code`.
    """

    messages: tuple[Message, ...]
    kind: str


def file_prompts(path: Path) -> list[TrainingPrompt]:
    """Read prompts from a JSON Lines file in the format of `edgespec bench --prompts`.

    Raises:
        OptionError: The file cannot be read or is invalid.
    """
    return [TrainingPrompt(each.messages, each.category) for each in read_prompts(path)]


def chat_prompts(store: ChatStore | None = None) -> list[TrainingPrompt]:
    """Return a prompt for each user message in the saved chats, skipping damaged chats.

    Args:
        store: The saved chats. Defaults to the default store.

    Raises:
        OptionError: There are no saved chats.
    """
    prompts = []
    for stored in (store or ChatStore()).list():
        try:
            chat = read_chat(stored.path, stored.id)
        except ChatFileError:
            continue
        for end, message in enumerate(chat.messages, 1):
            if message.role == "user":
                prompts.append(_own_prompt(with_system(chat.system, chat.messages[:end])))
    if not prompts:
        raise OptionError(
            "there are no saved chats to train with", "omit --chats", code="training_data_missing"
        )
    return prompts


def _own_prompt(messages: Sequence[Message]) -> TrainingPrompt:
    """Create a prompt, detecting the kind of text from its last message."""
    return TrainingPrompt(tuple(messages), text_kind(messages[-1].content))


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the target's reply to it.

    Attributes:
        tokens: Token ids of the prompt and the reply, int32 [tokens].
        prompt_length: Number of tokens in the prompt.
        kind: Kind of text, such as `code`.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    kind: str


class ConversationWriter:
    """Generates conversations in batches.

    A batch depends only on its index, the model and the prompts, so a resumed training run gets the
    same batches.

    Args:
        model: The model that generates the conversations.
        template: The target's chat template.
        prompts: Prompts to answer in the first batches. In later batches, the target generates the
            questions.

    Attributes:
        question_start: The prompt that makes the target generate a question, which is the chat template
            up to the user's message.

    Raises:
        TemplateError: The template rejects a message or leaves it out.
    """

    def __init__(self, model: Writer, template: ChatTemplate, prompts: Sequence[TrainingPrompt]) -> None:
        self._model, self._prompts = model, prompts
        self._builder = PromptBuilder(template, model.vocabulary)
        before, marker, _ = template.render([Message("user", _MARKER)]).partition(_MARKER)
        if not marker:
            raise TemplateError("the model's chat template omits the user's message", "use another model")
        bos = model.vocabulary.bos_text
        start = not (bos and before.startswith(bos))
        self.question_start = model.vocabulary.tokenize(before, special=True, start=start)
        self._max_prompt_tokens = _MAX_PROMPT_TOKENS
        if model.context_tokens:
            self._max_prompt_tokens = min(_MAX_PROMPT_TOKENS, model.context_tokens - _MAX_REPLY_TOKENS)

    def write(self, batch: int, progress: Progress) -> list[Conversation]:
        """Generate a batch of conversations. The batch can be empty if all of its prompts are too long.

        Args:
            batch: Index of the batch.
            progress: Called repeatedly. Returning False cancels the call.

        Raises:
            CancelledError: `progress` returned False.
            EdgespecError: The target generated no usable questions.
        """
        first = batch * BATCH_CONVERSATIONS
        given = self._prompts[first : first + BATCH_CONVERSATIONS]
        prompts = [
            (self._builder.build(each.messages).tokens, each.kind)
            for each in given or self._ask(batch, progress)
        ]
        prompts = [each for each in prompts if len(each[0]) <= self._max_prompt_tokens]
        temperatures = [_REPLY_TEMPERATURES[i % len(_REPLY_TEMPERATURES)] for i in range(len(prompts))]
        tokens = [tokens for tokens, _ in prompts]
        replies = (
            self._model.write(tokens, temperatures, _MAX_REPLY_TOKENS, 2 * batch + 1, progress)
            if tokens
            else []
        )
        written = [
            Conversation(np.array([*prompt, *reply], np.int32), len(prompt), kind)
            for (prompt, kind), reply in zip(prompts, replies, strict=True)
        ]
        if not written and not given:
            raise EdgespecError(
                "the model wrote no questions, so there is nothing to train on",
                "pass questions with --prompts",
                code="training_data_missing",
            )
        return written

    def _ask(self, batch: int, progress: Progress) -> list[TrainingPrompt]:
        """Have the target continue `question_start`, and return the finished questions."""
        count = BATCH_CONVERSATIONS
        starts, temperatures = [self.question_start] * count, [_QUESTION_TEMPERATURE] * count
        questions = self._model.write(starts, temperatures, _MAX_QUESTION_TOKENS, 2 * batch, progress)
        texts = [self._text(tokens) for tokens in questions if self._model.vocabulary.is_end(tokens[-1])]
        return [_own_prompt([Message("user", text)]) for text in texts if text]

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._model.vocabulary.piece, tokens)).decode("utf-8", "replace").strip()


def save_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write conversations to an `.npz` file. Raises OSError if the file cannot be written."""
    with replace_when_written(path) as unfinished, unfinished.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.empty(0, np.int32), *(each.tokens for each in conversations)]),
            ends=np.cumsum([len(each.tokens) for each in conversations], dtype=np.int64),
            prompt_lengths=np.array([each.prompt_length for each in conversations], np.int64),
            kinds=np.array([each.kind for each in conversations], dtype=np.str_),
        )


def read_conversations(path: Path, vocab_size: int) -> list[Conversation]:
    """Read a file written by `save_conversations`. Raises ModelFileError if it is missing or damaged."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            stored_tokens = file["tokens"]
            if stored_tokens.ndim != 1 or stored_tokens.dtype != np.int32:
                raise ValueError("the tokens are not a list of whole numbers")
            # MLX does not check token ids, and would read past the end of the embedding table.
            if stored_tokens.size and not 0 <= stored_tokens.min() <= stored_tokens.max() < vocab_size:
                raise ValueError(f"a token id is outside the vocabulary of {vocab_size:,} tokens")
            texts = np.split(stored_tokens, file["ends"])[:-1]
            return [
                Conversation(tokens, int(prompt_length), str(kind))
                for tokens, prompt_length, kind in zip(
                    texts, file["prompt_lengths"], file["kinds"], strict=True
                )
            ]
    except (OSError, ValueError, TypeError, IndexError, KeyError, BadZipFile) as error:
        raise ModelFileError(
            f"the conversations in {path} cannot be read: {error}",
            "delete this file and train again",
            code="training_damaged",
        ) from error


def batch_of(conversations: Sequence[Conversation]) -> TrainingBatch:
    """Combine conversations into a batch, padding each to the length of the longest."""
    length = max(len(each.tokens) for each in conversations)
    tokens = np.zeros((len(conversations), length), np.int32)
    replied = np.zeros((len(conversations), length), np.bool_)
    for row, each in enumerate(conversations):
        tokens[row, : len(each.tokens)] = each.tokens
        replied[row, each.prompt_length : len(each.tokens)] = True
    return TrainingBatch(tokens, replied)


def batches(
    conversations: Sequence[Conversation], max_tokens: int, random: np.random.Generator
) -> list[list[Conversation]]:
    """Group conversations of similar length into batches, and return the batches in random order.

    Grouping by length minimises padding. A batch has at most `max_tokens` tokens including padding, unless a
    single conversation is longer.
    """
    shuffled = [conversations[i] for i in random.permutation(len(conversations))]
    divided: list[list[Conversation]] = [[]]
    for each in sorted(shuffled, key=lambda each: len(each.tokens)):
        if divided[-1] and len(each.tokens) * (len(divided[-1]) + 1) > max_tokens:
            divided.append([])
        divided[-1].append(each)
    return [divided[i] for i in random.permutation(len(divided))]


def step_tokens(tokens: int) -> int:
    """Return the maximum number of tokens per training step, given the number of tokens to train on."""
    return min(BATCH_TOKENS, max(_MIN_BATCH_TOKENS, PASSES * tokens // _WANTED_STEPS))


def training_steps(conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """Return the batch for each training step. The order is deterministic, so training can be resumed."""
    batch_tokens = step_tokens(sum(len(each.tokens) for each in conversations))
    return [
        batch
        for repetition in range(PASSES)
        for batch in batches(conversations, batch_tokens, np.random.default_rng(repetition))
    ]


def token_counts(conversations: Sequence[Conversation], vocab_size: int) -> NDArray[np.int64]:
    """Count how often each token occurs in the replies. Returns int64 [vocabulary]."""
    replies = [each.tokens[each.prompt_length :] for each in conversations]
    return np.bincount(np.concatenate(replies), minlength=vocab_size).astype(np.int64)
