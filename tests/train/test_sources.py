"""Sources of conversations: the target's own questions, a file of prompts, and saved chats."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import EdgespecError, OptionError
from edgespec.train import TrainingPrompt, TrainingTarget, chat_prompts, file_prompts, load_target
from edgespec.train.conversations import (
    Conversation,
    ConversationWriter,
    batch_of,
    batches,
    read_conversations,
    save_conversations,
    token_counts,
)
from tests.backends.mlx.tiny_checkpoints import CONTROL, TOKENS, write_checkpoint
from tests.raising import raises
from tests.train.conftest import LAYERS, PROMPTS, no_progress

START, END = (TOKENS - len(CONTROL) + CONTROL.index(f"<|im_{name}|>") for name in ("start", "end"))


def test_the_target_writes_its_own_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.train.conversations._MAX_REPLY_TOKENS", 40)
    monkeypatch.setattr("edgespec.train.conversations.BATCH_CONVERSATIONS", 12)
    folder = write_checkpoint(tmp_path / "chatty", "llama", config={"num_hidden_layers": LAYERS})
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    # Make the end token about as likely as the others. See `write_checkpoint`.
    arrays["lm_head.weight"][END] = 1.2 * arrays["lm_head.weight"][7]
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    with load_target(folder, "chatty", None, no_progress) as target:
        writer = ConversationWriter(target.teacher, target.template, ())
        written = writer.write(0, no_progress)
        again = ConversationWriter(target.teacher, target.template, ()).write(0, no_progress)
        other = writer.write(1, no_progress)
    start = writer.question_start
    assert start[0] == START
    assert written
    for conversation in written:
        tokens = conversation.tokens.tolist()
        assert tokens[: len(start)] == start
        assert END in tokens[: conversation.prompt_length]
        assert conversation.prompt_length < len(tokens)
    assert [each.tokens.tolist() for each in again] == [each.tokens.tolist() for each in written]
    assert other[0].tokens.tolist() != written[0].tokens.tolist()


@pytest.mark.long
def test_given_prompts_are_answered_first(target: TrainingTarget) -> None:
    writer = ConversationWriter(target.teacher, target.template, PROMPTS[:3])
    assert [each.kind for each in writer.write(0, no_progress)] == ["code", "talk", "code"]


@pytest.mark.long
def test_long_prompts_are_left_out(target: TrainingTarget) -> None:
    long = TrainingPrompt((Message("user", "list " * 900),), "talk")
    writer = ConversationWriter(target.teacher, target.template, [long, PROMPTS[0]])
    assert [each.kind for each in writer.write(0, no_progress)] == ["code"]
    assert ConversationWriter(target.teacher, target.template, [long]).write(0, no_progress) == []


def test_a_target_that_writes_no_questions(target: TrainingTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.train.conversations._MAX_QUESTION_TOKENS", 1)
    with raises(EdgespecError, code="training_data_missing"):
        ConversationWriter(target.teacher, target.template, ()).write(0, no_progress)


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "category": "code"}\n{"prompt": "two"}\n')
    assert [(each.messages, each.kind) for each in file_prompts(file)] == [
        ((Message("user", "one"),), "code"),
        ((Message("user", "two"),), "other"),
    ]


def test_every_message_of_a_saved_chat_is_a_prompt(tmp_path: Path) -> None:
    store = ChatStore(tmp_path)
    with raises(OptionError, code="training_data_missing"):
        chat_prompts(store)
    messages = (Message("user", "a"), Message("assistant", "b"), Message("user", "```c```"))
    now = datetime.now(UTC)
    store.save(SavedChat(store.new_id(), MessageTree.linear(messages), now, now, system="be brief"))
    (tmp_path / "broken.json").write_text("{")
    system = Message("system", "be brief")
    assert [(each.messages, each.kind) for each in chat_prompts(store)] == [
        ((system, *messages[:1]), "talk"),
        ((system, *messages), "code"),
    ]


def conversations(*lengths: int) -> list[Conversation]:
    return [Conversation(np.arange(length, dtype=np.int32), length // 2, "talk") for length in lengths]


@pytest.mark.parametrize("lengths", [(4, 9, 2), (5,), ()])
def test_conversations_are_saved_and_read(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    saved = conversations(*lengths)
    save_conversations(tmp_path / "some.npz", saved)
    read = read_conversations(tmp_path / "some.npz", 1000)
    assert [(each.tokens.tolist(), each.prompt_length, each.kind) for each in read] == [
        (each.tokens.tolist(), each.prompt_length, each.kind) for each in saved
    ]


def test_batches_hold_every_conversation_once_and_are_not_too_large() -> None:
    given = conversations(*range(2, 40), 300)
    divided = batches(given, 128, np.random.default_rng(0))
    assert sorted(len(each.tokens) for batch in divided for each in batch) == [*range(2, 40), 300]
    assert all(batch_of(batch).tokens.size <= 128 for batch in divided if len(batch) > 1)


def test_only_replies_are_learnt_and_counted() -> None:
    batch = batch_of(conversations(4, 6))
    assert batch.replied.tolist() == [
        [False, False, True, True, False, False],
        [False, False, False, True, True, True],
    ]
    assert token_counts(conversations(4, 6), 8).tolist() == [0, 0, 1, 2, 1, 1, 0, 0]
