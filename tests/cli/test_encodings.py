"""Text that is not UTF-8, locales without an encoding, and file names with arbitrary bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.chat.store import ChatStore
from edgespec.errors import OptionError
from edgespec.system.stdio import check_utf8, decode_input, is_ascii
from edgespec.tui.input_syntax import ends_block
from tests.backends.tiny_models import write_llama
from tests.cases import covering, first
from tests.cli.conftest import Run, Start, one_line_error
from tests.raising import raises

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locales of bytes")
NO_LOCALE = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
TEXT = "日本語 🙂 größe ż"


@pytest.mark.long
@pytest.mark.parametrize(
    "env", first([NO_LOCALE, {"PYTHONIOENCODING": "cp1252"}, {"PYTHONIOENCODING": "latin-1"}], 2)
)
def test_a_pipe_gets_utf8_in_every_locale(start: Start, env: dict[str, str], tmp_path: Path) -> None:
    target = write_llama(tmp_path / "größe.gguf")
    process = start(
        *("generate", "--target", str(target), "--draft", "none", "--threads", "1", "--choice", TEXT, TEXT),
        env=env,
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.decode()) == (0, f"{TEXT}\n"), err


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "name"),
    covering(
        [("generate", "-n", "2", "hi"), ("plan",), ("models", "show")],
        [b"gr\xf6\xdfe.gguf", b"\xff.gguf", b"a\xe6\x97.gguf"],
    ),
)
def test_a_file_name_need_not_be_utf8(words: tuple[str, ...], name: bytes, run: Run, tmp_path: Path) -> None:
    path = write_llama(tmp_path / os.fsdecode(name))
    options = [str(path)] if words[0] == "models" else ["--target", str(path), "--draft", "none"]
    done = run(*words, *options)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("generate", "gr\udcf6"), "the prompt is not valid UTF-8 at byte 3"),
        (("generate", "hi", "--choice", "ü\udcff"), "--choice is not valid UTF-8 at byte 3"),
        (("generate", "hi", "--system", "\udce9"), "--system is not valid UTF-8 at byte 1"),
        (("race", "\udcf6"), "the prompt is not valid UTF-8 at byte 1"),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_its_place(
    words: tuple[str, ...], place: str, run: Run
) -> None:
    assert place in one_line_error(run(*words), 2)


@pytest.mark.long
def test_a_byte_order_mark_before_a_command_is_skipped(start: Start, tmp_path: Path) -> None:
    process = start(
        *("chat", "--target", "demo", "--draft", "none", "--threads", "1", "-n", "2"),
        stdin=subprocess.PIPE,
        env={"EDGESPEC_DATA_DIR": str(tmp_path / "data"), "PYTHONIOENCODING": "latin-1"},
    )
    lines = ["\ufeff/set temperature 0", '"""', "größe:", "def f():", '    """Return one."""', '"""', "/quit"]
    _, err = process.communicate("\n".join(lines).encode(), timeout=120)
    assert process.returncode == 0, err
    store = ChatStore(tmp_path / "data" / "chats")
    (stored,) = store.list()
    saved = store.load(stored.id)
    assert saved.sampling["temperature"] == 0
    sent = [each.content for each in saved.tree.messages if each.role == "user"]
    assert sent == ['größe:\ndef f():\n    """Return one."""']


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"gr\xf6", None, "standard input"),
        (b"gr\xf6\n", 4, "standard input"),
        ("hé".encode("utf-16"), 1, "standard input is UTF-16"),
        ("hé".encode("utf-16"), None, "standard input is UTF-16"),
    ],
)
def test_input_that_is_not_utf8_is_refused_with_its_place(
    data: bytes, line: int | None, message: str
) -> None:
    with raises(OptionError, message, code="invalid_encoding"):
        decode_input(data, line)


def test_a_byte_order_mark_is_skipped_at_the_start_only() -> None:
    marked = "\ufeffgröße\n".encode()
    assert decode_input(marked) == decode_input(marked, 1) == "größe\n"
    assert decode_input(marked, 2) == "\ufeffgröße\n"


def test_valid_text_and_encodings_are_recognised() -> None:
    assert check_utf8("x", TEXT) == TEXT
    assert [is_ascii(name) for name in ("ANSI_X3.4-1968", "US-ASCII", None, "utf-8", "latin-1", "odd")] == [
        *(True, True, True),
        *(False, False, False),
    ]


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        (['"""'], False),
        (['"""one line"""'], True),
        (['"""', "text", '"""'], True),
        (['"""', "text", '"""  '], True),
        (['"""', '    """Return one."""'], False),
        (['"""', 'sql = """'], False),
        (['"""Explain:', 'def f(): """Return one."""'], False),
        (['"""Explain:', '    """Return one.', '    More."""'], False),
        (['"""Explain:', '    """Return one."""', '"""'], True),
        (['"""two', "", 'lines"""'], True),
        (['""""""'], True),
    ],
)
def test_where_a_message_in_triple_quotes_ends(message: list[str], ends: bool) -> None:
    assert ends_block(message) is ends
