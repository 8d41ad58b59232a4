"""Constraints that crash llguidance or take minutes are rejected, and only stop the trial process."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable

import psutil
import pytest

from edgespec.constraints.compiler import ConstraintCompiler, ConstraintTrial
from edgespec.constraints.matcher import Constraint
from edgespec.errors import CapabilityError, OptionError
from tests.constraints.vocabularies import END, ByteVocabulary
from tests.raising import raises

VOCABULARY = ByteVocabulary(())
COMPILER = ConstraintCompiler(VOCABULARY, VOCABULARY.size)


def rules(count: int) -> Constraint:
    """A grammar whose rules use each other."""
    lines = [f'r{index}: r{index + 1} "a"' for index in range(count)]
    return Constraint("grammar", "\n".join(["start: r0", *lines, f'r{count}: "x"']))


def references(count: int) -> Constraint:
    """A schema whose definitions refer to each other."""
    definitions = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(count)}
    schema = {"$defs": {**definitions, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}
    return Constraint("schema", json.dumps(schema))


def terminals(count: int) -> Constraint:
    """A grammar with a regular expression that is nested deeply."""
    lines = [f'R{index}: R{index + 1} "a"' for index in range(count)]
    return Constraint("grammar", "\n".join(["start: R0", *lines, f'R{count}: "x"']))


@pytest.mark.long
@pytest.mark.parametrize("make", [rules, references, terminals])
def test_deep_nesting_is_refused(make: Callable[[int], Constraint]) -> None:
    COMPILER.check(make(60))
    with raises(OptionError, "nested too deeply", code="constraint_not_supported"):
        COMPILER.check(make(10_000 if make is terminals else 4_000))
    COMPILER.check(make(60))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit for CPU time")
def test_slow_constraints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.constraints.compiler._TRIAL_CPU_SECONDS", 0.1)
    with raises(OptionError, "than 0.1", code="constraint_not_supported"):
        COMPILER.check(Constraint("regex", "((((a{100}){100}){100}){100})"))


def test_errors_contain_no_stack_frames() -> None:
    with raises(OptionError, "panic", code="constraint_not_supported") as caught:
        COMPILER.check(Constraint("grammar", 'start: text "x"\ntext[lazy]: /(.|\\n)*/'))
    assert "backtrace" not in caught.value.what


def test_thousands_of_choices() -> None:
    choices = tuple(f"{index} (a|b) #é" for index in range(9_000))
    processor = COMPILER.processor(Constraint("choice", choices), [END])
    for token in VOCABULARY.tokenize("8999 (a|b) #é", special=False, start=False):
        processor.push(token)
    assert processor.forced_tokens(4) == [END]


def test_the_process_ends_with_the_trial() -> None:
    others = set(psutil.Process().children())
    trial = ConstraintTrial()
    assert isinstance(trial.run("regex", "a"), int)
    (child,) = set(psutil.Process().children()) - others
    del trial
    assert not child.is_running()


@pytest.mark.long
def test_a_dead_process_is_replaced() -> None:
    trial = ConstraintTrial()
    assert isinstance(trial.run("regex", "a"), int)
    assert trial._process
    os.kill(trial._process.pid, signal.SIGTERM)
    trial._process.wait()
    assert isinstance(trial.run("regex", "b"), int)


def test_without_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with raises(CapabilityError, code="process_not_started"):
        ConstraintTrial().run("regex", "a")


def test_a_kept_constraint_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ConstraintCompiler(VOCABULARY, VOCABULARY.size)
    kept = Constraint("regex", "kept")
    compiler.check(kept)
    started, release = threading.Semaphore(0), threading.Event()

    def slow(_trial: ConstraintTrial, _option: str, _text: str) -> int:
        started.release()
        assert release.wait(60)
        return 0

    monkeypatch.setattr(ConstraintTrial, "run", slow)
    threads = [
        threading.Thread(target=compiler.check, args=(Constraint("regex", f"slow{index}"),))
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    try:
        # Both are compiled at the same time.
        assert started.acquire(timeout=60)
        assert started.acquire(timeout=60)
        compiler.check(kept)
        assert not release.is_set()
    finally:
        release.set()
        for thread in threads:
            thread.join()


@pytest.mark.long
def test_large_constraints_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.constraints.compiler._MAX_CACHED_BYTES", 5 << 20)
    compiler = ConstraintCompiler(VOCABULARY, VOCABULARY.size)
    small, large = Constraint("regex", "small"), Constraint("regex", "a{100000}")
    compiler.check(small)
    compiler.check(Constraint("regex", "other"))
    compiler.check(small)
    assert len(compiler._cache) == 2
    compiler.check(large)
    assert list(compiler._cache) == [large]
