"""`edgespec chat --plain`: line by line, in pipes and on dumb terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from time import sleep

import pytest

import edgespec
from tests.cases import covering, first
from tests.cli.conftest import Run, Start, one_line_error

QUESTION = "How do I list files by size?"
# A script that runs a chat whose reply takes 20 seconds. Its argument is the folder of saved chats.
SLOW = """
import sys
from pathlib import Path
from edgespec.chat.saved_chat import ModelReferences
from edgespec.chat.store import ChatStore
from edgespec.tui.plain_run import run_plain_chat
from tests.tui.scripted import Script, ScriptedRuntime, loading
text = "".join(f"word {number} " for number in range(500))
runtime = ScriptedRuntime([Script(text, pause_seconds=0.02), Script("done")])
end = run_plain_chat(loading(runtime), models=ModelReferences("demo"), store=ChatStore(Path(sys.argv[1])))
sys.exit(130 if end.signalled else 0)
"""


def chats(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]


@pytest.mark.long
@pytest.mark.parametrize("temperature", first(["0.8", "0"]))
def test_a_pipe_gets_only_the_replies(start: Start, tmp_path: Path, temperature: str) -> None:
    process = start(
        *("chat", "--threads", "1", "--seed", "5", "-n", "40", "--temperature", temperature),
        trials=True,
        stdin=subprocess.PIPE,
        env={"EDGESPEC_DATA_DIR": str(tmp_path / "data")},
    )
    out, err = process.communicate(f"{QUESTION}\n\n/regen\n".encode(), timeout=120)
    assert process.returncode == 0, err
    with edgespec.load("demo", threads=1) as runtime:
        reply = runtime.generate(
            QUESTION, seed=5, max_tokens=40, temperature=float(temperature), method="none"
        )
    assert out.decode() == f"{reply.answer.rstrip(chr(10))}\n" * 2
    assert b"\x1b" not in out + err
    assert b"\r" not in out + err
    assert len(list((tmp_path / "data").rglob("chats/*.json"))) == 1


@pytest.mark.long
def test_an_unsaved_chat_is_reported_once_and_at_the_end(start: Start, tmp_path: Path) -> None:
    (tmp_path / "chats").write_text("")  # a file in place of the folder
    process = start(
        *("chat", "--threads", "1", "-n", "4"),
        stdin=subprocess.PIPE,
        env={"EDGESPEC_DATA_DIR": str(tmp_path)},
    )
    _, errors = process.communicate(f"{QUESTION}\n{QUESTION}\n".encode(), timeout=120)
    assert process.returncode == 1
    *before, last = errors.decode().strip().splitlines()
    assert len([line for line in before if line.startswith("Cannot save the chat to")]) == 1
    assert f"the chat {QUESTION!r} was not saved: cannot save the chat to" in last


@pytest.mark.long
def test_on_a_terminal_it_suggests_models_of_the_users_own(start: Start, tmp_path: Path) -> None:
    controller, terminal = os.openpty()
    process = start(
        *("chat", "--plain", "--threads", "1", "--memory", "12GiB"),
        stdin=terminal,
        env={"EDGESPEC_DATA_DIR": str(tmp_path / "data")},
    )
    os.write(controller, b"/quit\n")
    _, err = process.communicate(timeout=120)
    os.close(terminal)
    os.close(controller)
    said = b" ".join(err.split())
    assert b"Type /model to choose and download a real model. These fit this machine" in said
    assert b"qwen3.5-2b (" in said


@pytest.mark.long
def test_commands_work_line_by_line(start: Start, tmp_path: Path) -> None:
    lines = [
        "/set temperature 0",
        "/show",
        "/why",
        "/system Be brief.",
        QUESTION,
        "/why",
        "/save My chat",
        "/load",
    ]
    lines += ["/theme", "/nope", "/set temprature 1", "/new", "/load My", "/help", "/quit", "never sent"]
    process = start(
        *("chat", "--threads", "1", "-n", "20"),
        stdin=subprocess.PIPE,
        env={"EDGESPEC_DATA_DIR": str(tmp_path / "data")},
    )
    output, errors = process.communicate("\n".join(lines).encode(), timeout=120)
    out, err = output.decode(), errors.decode()
    assert process.returncode == 0, err
    for text in (
        "temperature is now 0.",
        "temperature: 0",
        "edgespec will guess words, from: draft model + repeated text.",
        "System prompt: Be brief.",
    ):
        assert text in out
    for text in (
        "Saved as 'My chat'.",
        "My chat (now, 2 messages)",
        "/regen: generate another reply to your last message",
    ):
        assert text in out
    for text in (
        "/theme is not available in the plain chat",
        "Unknown command /nope",
        "Opened “My chat”",
        "temperature?",
    ):
        assert text in err
    assert "never sent" not in out + err
    assert "--resume" in err


@pytest.mark.long
def test_several_lines_are_one_message(start: Start, tmp_path: Path) -> None:
    code = SLOW.replace("Script(text,", 'Script("yes",')
    process = start(str(tmp_path), code=code, stdin=subprocess.PIPE)
    out, _ = process.communicate(b'"""two\n\nlines"""\n', timeout=120)
    assert out == b"yes\n"
    assert chats(tmp_path)[0]["messages"][0]["content"] == "two\n\nlines"  # type: ignore[index]


@pytest.mark.long
def test_ctrl_c_stops_the_reply_and_twice_quits(start: Start, tmp_path: Path) -> None:
    process = start(str(tmp_path), code=SLOW, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"one\n")
    process.stdin.flush()
    assert process.stdout.read(5) == b"word "
    process.send_signal(signal.SIGINT)
    sleep(2.5)
    process.stdin.write(b"two\n")
    process.stdin.flush()
    text = b""
    while b"done" not in text:
        text += os.read(process.stdout.fileno(), 1000)
    sleep(1)
    process.send_signal(signal.SIGINT)
    sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"Stopped. Type /continue" in err
    assert b"Press Ctrl-C again to quit" in err
    assert b"Traceback" not in err
    (saved,) = chats(tmp_path)
    assert len(saved["messages"]) == 4  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(("number", "writing"), covering([signal.SIGTERM, signal.SIGHUP], [False, True]))
def test_a_signal_ends_the_chat_and_keeps_the_reply(
    start: Start, tmp_path: Path, number: signal.Signals, writing: bool
) -> None:
    process = start(str(tmp_path), code=SLOW, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"one\n" if writing else b"/memory\n")
    process.stdin.flush()
    assert process.stdout.read(5)
    process.send_signal(number)
    # `communicate` closes stdin, which also ends the chat, so wait for the signal to stop the chat first.
    process.wait(timeout=120)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in err
    if writing:
        (saved,) = chats(tmp_path)
        assert saved["messages"][1]["content"].startswith("word ")  # type: ignore[index]
        assert saved["unfinished"] is True


def test_a_model_that_cannot_be_loaded_is_one_line(run: Run) -> None:
    result = run("chat", "--plain", "--target", "/nowhere.gguf", input="hello\n")
    assert result.exit_code == 1
    assert "/nowhere.gguf" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_unknown_option_is_refused(run: Run) -> None:
    one_line_error(run("chat", "--plian"), 2, "--plian", code="option_unknown")
