"""A resize that fails or is interrupted loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType

import psutil
import pytest

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_plan import ContextPlan
from edgespec.engine.tree import TokenTree
from edgespec.errors import ContextFullError, MemoryBudgetError
from edgespec.store.catalogue import models_folder
from tests.backends.contract import tokens_for
from tests.backends.resizable import KINDS, LARGE, LLAMA, SMALL, Twins, check_step, load
from tests.raising import raises


def limit_allocations(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Make allocations of larger contexts fail."""
    original = LlamaContext.allocate

    def allocate(self: LlamaContext, plan: ContextPlan) -> None:
        if plan.tokens > tokens:
            self.release()
            raise MemoryBudgetError(f"no memory for {plan.tokens} tokens", "use fewer")
        original(self, plan)

    monkeypatch.setattr(LlamaContext, "allocate", allocate)


class TestOutOfMemory:
    @pytest.mark.long
    @pytest.mark.parametrize("name", LLAMA)
    def test_a_resize_beyond_the_budget_is_refused(self, name: str, tmp_path: Path) -> None:
        model = load(name, tmp_path, initial_context_tokens=SMALL)
        if name == "mamba":
            pytest.skip("its state is as large whatever the context")
        facts = model.facts
        model.close()
        enough = facts.weight_bytes + facts.max_kv_bytes + 64 * 2**20
        model = load(name, tmp_path, initial_context_tokens=SMALL, memory_bytes=enough)
        tokens = tokens_for(model, 100)
        model.prefill(tokens)
        with raises(MemoryBudgetError, "use --context"):
            model.resize(1 << 30)
        assert (model.length, model.facts.context_tokens) == (100, SMALL)
        model.resize(LARGE)
        model.close()

    def test_a_resize_beyond_the_available_memory_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = load("full", tmp_path, initial_context_tokens=SMALL)
        free = psutil.virtual_memory()._replace(available=model.facts.max_kv_bytes - 1)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
        with raises(MemoryBudgetError, "1,024"):
            model.resize(LARGE)
        model.resize(512)
        model.close()

    def test_a_failed_copy_of_the_cells_changes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_memory(*_: object) -> None:
            raise MemoryError

        model = load("full", tmp_path, initial_context_tokens=SMALL)
        model.prefill(tokens_for(model, 100))
        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "export_sequence", no_memory)
            with raises(MemoryBudgetError, "100", code="out_of_memory"):
                model.resize(512)
        assert (model.length, model.facts.context_tokens) == (100, SMALL)
        model.resize(512)
        model.close()

    @pytest.mark.long
    @pytest.mark.parametrize("name", LLAMA)
    def test_a_failed_allocation_restores_the_old_context(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, whole = (load(name, tmp_path, initial_context_tokens=first) for first in (SMALL, None))
        pair = Twins(model, whole, KINDS[name].rounding)
        for one in pair[:2]:
            one.prefill(tokens_for(one, 200))
        with monkeypatch.context() as patch:
            limit_allocations(patch, SMALL)
            with raises(MemoryBudgetError, "512"):
                model.resize(512)
        assert (model.length, model.free_tokens, model.facts.context_tokens) == (200, SMALL - 200, SMALL)
        check_step(pair)
        model.resize(512)
        check_step(pair, 5)
        model.close()
        whole.close()

    @pytest.mark.long
    @pytest.mark.parametrize("name", LLAMA)
    @pytest.mark.parametrize("failing", [1, 2])
    def test_a_context_without_memory_refuses_tokens(
        self, name: str, failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a split model, only the second context may fail."""
        model = load(name, tmp_path, initial_context_tokens=SMALL)
        model.prefill(tokens_for(model, 100))
        made = 0
        original = LlamaContext.allocate

        def failed(self: LlamaContext, plan: ContextPlan) -> None:
            nonlocal made
            made += 1
            if made < failing:
                return original(self, plan)
            self.release()
            raise MemoryBudgetError("no memory at all", "close other programs")

        with monkeypatch.context() as patch:
            patch.setattr(LlamaContext, "allocate", failed)
            if failing == 2 and not name.startswith("split"):
                model.resize(512)
                assert model.length == 100
            else:
                with pytest.raises(MemoryBudgetError):
                    model.resize(512)
                assert model.length == 0 == model.free_tokens
                with pytest.raises(ContextFullError):
                    model.prefill([5, 6])
                with pytest.raises(ContextFullError):
                    model.verify(TokenTree.chain(5))
                model.truncate(0)
        model.close()


class TestInterrupted:
    """A KeyboardInterrupt at any call leaves the cache unchanged, with the old or the new size."""

    @pytest.mark.parametrize("name", ["full", "hybrid", "split, window"])
    def test_an_interrupt_at_any_call_keeps_the_cache(self, name: str, tmp_path: Path) -> None:
        model, whole = (load(name, tmp_path, initial_context_tokens=first) for first in (SMALL, None))
        for one in (model, whole):
            one.prefill(tokens_for(one, 100))
        calls = 0

        def at_call(frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            if event in ("call", "c_call") and "edgespec/backends" in frame.f_code.co_filename:
                # Callbacks from C cannot raise.
                inner: FrameType | None = frame
                while inner:
                    if inner.f_code.co_filename.endswith("native.py"):
                        return
                    inner = inner.f_back
                calls -= 1
                if calls == 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        target_call, interrupted = 1, True
        while interrupted:
            interrupted, calls = False, target_call
            sys.setprofile(at_call)
            try:
                model.resize(SMALL if target_call % 2 else 512)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.setprofile(None)
            assert model.length == 100
            assert model.free_tokens in (SMALL - 100, 512 - 100)
            target_call += 1 + target_call // 8
        assert target_call > 30
        check_step(Twins(model, whole, KINDS[name].rounding))
        model.close()
        whole.close()

    @pytest.mark.long
    def test_ctrl_c_inside_a_callback_is_raised_afterwards(self) -> None:
        program = (
            "import signal, sys, time\n"
            "from edgespec.backends.llamacpp.loading import load_vocabulary\n"
            "from edgespec.backends.llamacpp.native import library, captured_log\n"
            "library()\n"
            # A background process may ignore SIGINT by default.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "def interrupt(frame, event, _):\n"
            "    if event == 'call' and frame.f_code.co_name == '_on_line':\n"
            "        sys.setprofile(None)\n"
            "        signal.raise_signal(signal.SIGINT)\n"
            "try:\n"
            "    sys.setprofile(interrupt)\n"
            "    load_vocabulary(sys.argv[1])\n"
            "    time.sleep(30)\n"
            "except KeyboardInterrupt:\n"
            "    print('heard')\n"
        )
        command = [sys.executable, "-c", program, str(models_folder() / "demo-draft-q8_0.gguf")]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "heard\n", "")
