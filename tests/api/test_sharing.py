"""Chats of one user share a loaded model: same replies, one at a time, nothing lost when the host ends."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from edgespec import Message, Runtime, __version__, errors
from edgespec.api.sharing import sockets
from edgespec.api.sharing.base import ChatModel, Identity
from edgespec.api.sharing.chat_sharing import ChatSharing
from edgespec.api.sharing.client import SharedModel, find_shared
from edgespec.api.sharing.host import HostedModel, HostRequest, ModelHost
from edgespec.errors import ClosedError, ContextFullError, EdgespecError, OptionError, WorkerLostError
from edgespec.store.download import Progress
from edgespec.store.reference import resolve
from edgespec.tui.worker import Ask, ModelThread
from tests.raising import raises
from tests.server.conftest import running
from tests.tui.driving import driving

ARGUMENTS: dict[str, Any] = {"target": "demo", "draft": "auto", "threads": 1, "context": 1024}
QUESTION = Message("user", "How do I list files by size?")
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 40}
HOST = """
import sys, time
from contextlib import nullcontext
from edgespec.api.sharing.chat_sharing import ChatSharing
sharing = ChatSharing()
sharing.load({"target": "demo", "draft": "auto", "threads": 1, "context": 1024}, lambda *_: True)
with sharing.turn(lambda: None, lambda: True) if "hold" in sys.argv else nullcontext():
    print("ready", flush=True)
    time.sleep(600)
"""


def load(sharing: ChatSharing, **options: Any) -> ChatModel:
    return sharing.load({**ARGUMENTS, **options}, lambda *_: True)


@pytest.fixture(autouse=True)
def own_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the sockets of other tests out."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.fixture
def host() -> Iterator[tuple[ChatSharing, Runtime]]:
    """A chat that has loaded the demo model."""
    sharing = ChatSharing()
    runtime = load(sharing)
    assert isinstance(runtime, Runtime)
    yield sharing, runtime
    sharing.withdraw()
    runtime.close()


@pytest.fixture
def shared(host: tuple[ChatSharing, Runtime]) -> SharedModel:
    """The model of the host, as another chat sees it."""
    found = load(ChatSharing())
    assert isinstance(found, SharedModel)
    return found


def test_replies_and_facts_equal_those_of_the_host(
    host: tuple[ChatSharing, Runtime], shared: SharedModel
) -> None:
    _, runtime = host
    messages = [Message("system", "Be brief."), QUESTION]
    own = runtime.stream_messages(messages, **SAMPLED)
    expected = own.wait()
    stream = shared.stream_messages(messages, **SAMPLED)
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        stats = stream.stats
        assert len(stats.rounds) == stats.target_passes + stats.prompt_pass_tokens
    assert stream.reply.tokens == expected.tokens
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert (stream.prompt_tokens, stream.reply_start) == (own.prompt_tokens, own.reply_start)
    assert shared.count_tokens(messages) == runtime.count_tokens(messages)
    assert shared.target == runtime.target
    assert shared.draft == runtime.draft
    assert shared.drafters == runtime.drafters
    assert shared.method_for("model") == runtime.method_for("model")
    assert shared.exactness_for(temperature=0.8) == runtime.exactness_for(temperature=0.8)
    assert shared.reply_defaults() == runtime.reply_defaults()
    assert shared.has_thinking_switch() == runtime.has_thinking_switch()
    assert shared.memory().plan == runtime.plan
    text = "Zwölf Boxkämpfer"
    tokens = runtime.vocabulary.tokenize(text, special=False, start=False)
    assert shared.vocabulary.tokenize(text, special=False, start=False) == tokens
    assert shared.vocabulary.min_tokens(text) == runtime.vocabulary.min_tokens(text)


def test_replies_of_two_chats_wait_for_each_other(
    host: tuple[ChatSharing, Runtime], shared: SharedModel
) -> None:
    sharing, runtime = host
    said, waits = [], threading.Event()

    def progress(description: str, _: float) -> bool:
        said.append(description)
        waits.set()
        return True

    def reply() -> None:
        shared.stream_messages([QUESTION], progress=progress, **SAMPLED).wait()

    thread = threading.Thread(target=reply)
    with sharing.turn(lambda: None, lambda: True):
        thread.start()
        assert waits.wait(60)
        assert runtime.stream_messages([QUESTION], **SAMPLED).wait().tokens
        assert set(said) == {"waiting for another reply to finish"}
    thread.join(60)
    assert "reading the prompt" in said


def test_a_waiting_reply_can_be_given_up(host: tuple[ChatSharing, Runtime], shared: SharedModel) -> None:
    sharing, _ = host
    with sharing.turn(lambda: None, lambda: True), raises(errors.CancelledError, code="cancelled"):
        shared.stream_messages([QUESTION], progress=lambda *_: False, **SAMPLED)


def test_a_cancelled_reply_keeps_its_text(shared: SharedModel) -> None:
    stream = shared.stream_messages([QUESTION], **{**SAMPLED, "max_tokens": 900})
    chunks = iter(stream)
    next(chunks)
    stream.cancel()
    rest = list(chunks)
    assert stream.reply.finish_reason == "cancelled"
    assert len(rest) < 100
    assert stream.reply.text
    assert list(shared.stream_messages([QUESTION], **SAMPLED)), "the host is free again"


def test_errors_arrive_with_their_class_and_code(shared: SharedModel) -> None:
    with raises(OptionError, "-1", option="temperature"):
        shared.stream_messages([QUESTION], temperature=-1.0)
    with pytest.raises(ContextFullError):
        shared.stream_messages([Message("user", "word " * 3000)], **SAMPLED)
    with raises(OptionError, "magic"):
        shared.method_for("magic")
    with pytest.raises(EdgespecError):
        shared._call("close")


def _classes(kind: type[EdgespecError]) -> Iterator[type[EdgespecError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _classes(each)


def test_every_error_can_be_sent() -> None:
    for kind in _classes(EdgespecError):
        error = kind.__new__(kind)
        EdgespecError.__init__(error, "the file is missing", "check the path", code="gone", option="target")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (kind, str(error), vars(error))


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({}, True),
        ({"context": None, "threads": None}, True),
        ({"draft": "demo-draft"}, True),
        ({"prefix_cache": "disk"}, True),
        ({"prefix_cache": "none"}, False),
        ({"parallel": 2}, False),
        ({"draft": "none"}, False),
        ({"context": 2048}, False),
        ({"methods": ("lookahead",)}, False),
        ({"exactness": "bits"}, False),
        ({"target": "demo-draft"}, False),
    ],
)
def test_only_a_model_that_was_loaded_as_wanted_is_shared(wanted: dict[str, Any], fits: bool) -> None:
    loaded, other = Identity.of(ARGUMENTS), Identity.of({**ARGUMENTS, **wanted})
    assert loaded is not None
    assert other is not None
    draft = str(resolve("demo-draft").path)
    assert loaded.fits(other, draft) is fits


def test_a_server_with_weaker_exactness_is_not_shared() -> None:
    own = Identity.of(ARGUMENTS)
    assert own is not None
    for weaker in ({"parallel": 3}, {"exactness": "off"}):
        loaded = Identity.of({**ARGUMENTS, **weaker})
        assert loaded is not None
        assert not loaded.fits(own, "none")


def test_a_program_that_keeps_more_of_the_texts_is_not_shared() -> None:
    """With `--no-remember` or without an on-disk cache, no other program may save this chat's text."""
    own = Identity.of(ARGUMENTS)
    assert own is not None
    for more in ({"prefix_cache": "disk"}, {"remember": True}):
        loaded = Identity.of({**ARGUMENTS, **more})
        assert loaded is not None
        assert not loaded.fits(own, "none")
        assert own.fits(loaded, "none")
    less = Identity.of({**ARGUMENTS, "prefix_cache": "none"})
    assert less is not None
    assert less.fits(own, "none")
    assert Identity.of({**ARGUMENTS, "prefix_cache": "everywhere"}) is None


def test_a_replaced_file_is_another_model(tmp_path: Path, demo_target: Path, demo_draft: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(demo_target, path)
    loaded = Identity.of({"target": str(path)})
    shutil.copy(demo_draft, path)
    replaced = Identity.of({"target": str(path)})
    assert loaded is not None
    assert replaced is not None
    assert not loaded.fits(replaced, "none")


@pytest.mark.parametrize(
    "arguments", [{"target": "no-such-model"}, {"target": "demo", "workers": "127.0.0.1:1"}]
)
def test_models_elsewhere_have_no_identity(arguments: dict[str, Any]) -> None:
    assert Identity.of(arguments) is None


@pytest.fixture
def host_process(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A chat in another process that has loaded the demo model. With the parameter `hold`, it stays busy."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, getattr(request, "param", "")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def _ask(thread: ModelThread, **options: Any) -> Any:
    return thread.ask(Ask(None, (QUESTION,), {**SAMPLED, **options})).result(120)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "suspended"])
def test_a_chat_loads_the_model_itself_when_the_host_is_gone(
    host_process: subprocess.Popen[str], end: signal.Signals
) -> None:
    sharing = ChatSharing()
    thread = ModelThread(lambda progress: sharing.load(ARGUMENTS, progress), sharing)
    try:
        before = thread.start().result(60)
        assert isinstance(before, SharedModel)
        expected = _ask(thread).reply.tokens
        host_process.send_signal(end)
        assert _ask(thread).reply.tokens == expected
        assert isinstance(thread.runtime, Runtime)
        assert isinstance(load(ChatSharing()), SharedModel), "it shares the model in turn"
    finally:
        thread.close()
        assert thread.join(60)


async def test_the_screen_says_whose_model_it_is(host_process: subprocess.Popen[str], tmp_path: Path) -> None:
    sharing = ChatSharing()
    load_shared = partial(sharing.load, ARGUMENTS)
    async with driving(load_shared, tmp_path / "chats", size=(100, 40), sharing=sharing) as d:
        await d.said(f"shares the model that another chat (process {host_process.pid}) has loaded")
        await d.say(QUESTION.content)
        await d.say("/show")
        await d.said(f"another chat (process {host_process.pid})")
        host_process.kill()
        await d.say("And by name?")
        await d.said("so this chat has loaded the model itself")
        assert d.chat.current_chat.entries[-1].role == "assistant"


async def test_a_race_shows_how_the_model_is_loaded_again(
    host_process: subprocess.Popen[str], tmp_path: Path
) -> None:
    sharing, gate = ChatSharing(), threading.Event()

    def load_shared(progress: Progress) -> ChatModel:
        if gate.is_set():
            progress("loading demo again", 0.5)
            gate.clear()
            sleep(2)
        return sharing.load(ARGUMENTS, progress)

    async with driving(load_shared, tmp_path / "chats", size=(100, 40), sharing=sharing) as d:
        host_process.kill()
        host_process.wait()
        gate.set()
        await d.send(f"/race {QUESTION.content}")
        await d.sees("loading demo again")
        await d.sees("R plays again")
        await d.press("escape")
        await d.said("so this chat has loaded the model itself")
        assert isinstance(d.chat.runtime, Runtime)


async def test_no_command_fails_while_the_host_is_gone(
    host_process: subprocess.Popen[str], tmp_path: Path
) -> None:
    sharing = ChatSharing()
    load_shared = partial(sharing.load, ARGUMENTS)
    async with driving(load_shared, tmp_path / "chats", size=(100, 40), sharing=sharing) as d:
        host_process.kill()
        host_process.wait()
        commands = (
            *("/show", "/why", "/memory", "/set temperature 0.3", "/set top_k 5", "/set method ngram"),
            *("/think on", "/tokens", "/draft", "/context", "/stats", "/race"),
        )
        for command in commands:
            await d.say(command)
        for key in ("f3", "f5", "escape", "f9", "escape"):
            await d.press(key)
            await d.settled()
        assert d.app.is_running
        await d.say(QUESTION.content)
        assert d.chat.current_chat.entries[-1].role == "assistant"


def test_the_end_of_the_host_during_a_reply_is_an_error(
    host_process: subprocess.Popen[str],
) -> None:
    shared = load(ChatSharing())
    stream = shared.stream_messages([QUESTION], **{**SAMPLED, "max_tokens": 900})
    next(iter(stream))
    host_process.kill()
    with pytest.raises(WorkerLostError):
        list(stream)


def test_a_chat_shares_the_model_of_the_server() -> None:
    with running(load_options={"context": 1024}, idle_unload_seconds=0.01) as server:
        sharing = ChatSharing()
        shared = load(sharing)
        assert isinstance(shared, SharedModel)
        assert "edgespec serve" in shared.host
        first = shared.stream_messages([QUESTION], **SAMPLED).wait()
        # The server unloads the model at once, and loads it again.
        again = shared.stream_messages([QUESTION], **SAMPLED).wait()
        assert first.tokens == again.tokens
        assert not sharing.is_lost(shared)
        assert server.url
    assert sharing.is_lost(shared)


def test_a_guest_that_does_not_read_does_not_hold_up_the_host(
    host: tuple[ChatSharing, Runtime], shared: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing, runtime = host
    monkeypatch.setattr(sockets, "_SEND_SECONDS", 1)
    options = {**SAMPLED, "max_tokens": 900}
    with sockets.connect(shared._path) as connection:
        connection.send(HostRequest(__version__, shared._identity, "stream", ([QUESTION],), options))
        assert connection.recv()
        # Wait until it is the host's turn. The host then fills the connection.
        deadline = monotonic() + 60
        while not sharing._queue._running and monotonic() < deadline:  # type: ignore[union-attr]
            sleep(0.01)
        with sharing.turn(lambda: None, lambda: True):
            assert runtime.stream_messages([QUESTION], **SAMPLED).wait().tokens


def test_a_chat_loads_the_model_itself_when_the_host_ends_while_it_loads() -> None:
    class Stopped(AbstractContextManager[HostedModel]):
        def __enter__(self) -> HostedModel:
            raise ClosedError("the server is stopping", "start it again")

        def __exit__(self, *_: object) -> None: ...

    host = ModelHost("edgespec serve", lambda _: Stopped())
    sharing = ChatSharing()
    try:
        runtime = load(sharing)
        assert isinstance(runtime, Runtime)
        sharing.withdraw()
        runtime.close()
    finally:
        host.close()


@pytest.mark.parametrize("host_process", ["hold"], indirect=True)
def test_a_waiting_reply_can_be_given_up_although_the_host_is_suspended(
    host_process: subprocess.Popen[str],
) -> None:
    shared = load(ChatSharing())
    calls = []

    def progress(description: str, _: float) -> bool:
        calls.append(description)
        if len(calls) == 2:
            host_process.send_signal(signal.SIGSTOP)
        return len(calls) < 5

    with raises(errors.CancelledError, code="cancelled"):
        shared.stream_messages([QUESTION], progress=progress, **SAMPLED)
    large = "word " * 1_000_000
    assert len(shared.vocabulary.tokenize(large, special=False, start=False)) > 100_000, "an estimate"


def test_a_socket_that_was_deleted_is_no_error() -> None:
    sharing = ChatSharing()
    runtime = load(sharing)
    assert isinstance(runtime, Runtime)
    (path,) = sockets.sockets()
    path.unlink()
    for _ in range(2):
        sharing.withdraw()
    runtime.close()


def test_two_chats_that_start_together_load_one_model() -> None:
    chats = [ChatSharing(), ChatSharing()]
    with ThreadPoolExecutor() as pool:
        loaded = list(pool.map(load, chats))
    assert sorted(isinstance(each, SharedModel) for each in loaded) == [False, True]
    for chat, model in zip(chats, loaded, strict=True):
        chat.withdraw()
        model.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), NotImplementedError()])
def test_a_model_is_loaded_where_nothing_can_be_locked(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("filelock.BaseFileLock.acquire", refuse)
    sharing = ChatSharing()
    runtime = load(sharing, trust=True, measure_costs=False)
    assert isinstance(runtime, Runtime)
    sharing.withdraw()
    runtime.close()


def test_a_reply_ends_unfinished_when_the_host_closes(
    host: tuple[ChatSharing, Runtime], shared: SharedModel
) -> None:
    sharing, _ = host
    stream = shared.stream_messages([QUESTION], **{**SAMPLED, "max_tokens": 900})
    next(iter(stream))
    sharing.withdraw()
    with pytest.raises(WorkerLostError):
        list(stream)
    with raises(EdgespecError, code="reply_unfinished"):
        stream.reply  # noqa: B018


def test_garbage_does_not_end_the_host(host: tuple[ChatSharing, Runtime], shared: SharedModel) -> None:
    (path,) = sockets.sockets()
    for data in (b"garbage", pickle.dumps(("a", "tuple")), b""):
        with sockets.connect(path) as connection:
            connection.send_bytes(data)
            with pytest.raises(EOFError):
                connection.recv()
    assert shared.is_there()


def test_a_socket_of_a_killed_program_is_removed(host_process: subprocess.Popen[str]) -> None:
    assert list(sockets.sockets())
    host_process.kill()
    host_process.wait()
    identity = Identity.of(ARGUMENTS)
    assert identity is not None
    assert find_shared(identity) is None
    assert not list(sockets.sockets())


def test_nothing_is_shared_through_a_folder_that_others_can_enter(tmp_path: Path) -> None:
    folder = tmp_path / f"edgespec-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    sharing = ChatSharing()
    runtime = load(sharing)
    try:
        assert isinstance(runtime, Runtime)
        assert not list(folder.iterdir())
        assert not list(sockets.sockets())
    finally:
        sharing.withdraw()
        runtime.close()


def test_other_data_folders_are_other_users(
    host: tuple[ChatSharing, Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(sockets.sockets())
    monkeypatch.setenv("EDGESPEC_DATA_DIR", str(tmp_path / "other"))
    assert not list(sockets.sockets())
