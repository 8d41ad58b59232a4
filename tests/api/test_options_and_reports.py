"""Options, stats, notices and templates of a runtime."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec import Message, Reply, Runtime
from edgespec.engine.processors import Candidates, LogitsProcessor
from edgespec.errors import CapabilityError, ContextFullError, OptionError, TemplateError
from tests.api.questions import HOWTO, METHODS, REPEATS
from tests.api.test_tool_calls import NOW
from tests.backends.tiny_models import CHATML, write_llama
from tests.raising import raises


def _drained(stream: edgespec.ReplyStream) -> Reply:
    for _ in stream:
        pass
    return stream.reply


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": -5}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"max_tokens": True}, "max_tokens"),
            ({"seed": -1}, "seed"),
            ({"seed": "seven"}, "seed"),
            ({"seed": 2**63}, "seed"),
            ({"method": "modle"}, "'model'"),
            ({"method": ""}, "method ''"),
            ({"method": "model+ngram+model"}, "more than once"),
            ({"draft_length": 0}, "draft_length"),
            ({"draft_length": 10**9}, "draft_length"),
            ({"acceptance": "always"}, "acceptance"),
            ({"acceptance": ""}, "acceptance"),
            ({"stop": [""]}, "stop"),
            ({"stop": [5]}, "stop"),
            ({"stop": 5}, "stop"),
            ({"temperature": -1.0}, "temperature"),
            ({"temperature": math.nan}, "temperature"),
            ({"top_k": 10**9}, "top_k"),
            ({"logit_bias": {0: math.nan}}, "logit_bias"),
        ],
    )
    def test_invalid_options_raise_at_once(self, demo: Runtime, options: dict[str, Any], says: str) -> None:
        with raises(OptionError, says) as caught:
            demo.stream(HOWTO, **options)
        assert "\n" not in str(caught.value)
        assert caught.value.next_step or " must " in caught.value.what

    def test_an_unknown_option_suggests_a_known_one(self, demo: Runtime) -> None:
        options: Any = {"temprature": 1.0}
        with raises(OptionError, "'temperature'", code="option_unknown"):
            demo.stream(HOWTO, **options)

    def test_custom_processors_apply_to_every_method(self, demo: Runtime) -> None:
        class EvenTokens(LogitsProcessor):
            def apply(self, candidates: Candidates) -> Candidates:
                tokens, logits = candidates
                return tokens, np.where(tokens % 2 == 0, logits, -np.inf)

        replies = [
            demo.generate(REPEATS, seed=1, max_tokens=30, method=method, processors=[EvenTokens()]).tokens
            for method in ("none", "model", "suffix")
        ]
        assert replies[0] == replies[1] == replies[2]
        assert not any(token % 2 for token in replies[0])

    def test_a_single_stop_is_one_text(self, demo: Runtime) -> None:
        options: dict[str, Any] = {"max_tokens": 24, "seed": 1, "temperature": 0}
        whole = demo.generate(HOWTO, **options).text
        stop = whole[5:9]
        one = demo.generate(HOWTO, stop=stop, **options)
        assert one.text == demo.generate(HOWTO, stop=[stop], **options).text == whole[: whole.index(stop)]
        # Each of its letters alone would have ended it earlier.
        assert any(letter in one.text for letter in stop)

    def test_invalid_prompts_raise(self, demo: Runtime) -> None:
        with raises(OptionError, code="prompt_empty"):
            demo.stream_tokens([])
        with raises(OptionError, "prompt"):
            demo.generate(None)  # type: ignore[arg-type]
        for token in (-1, demo.target.vocab_size, 1.5, "5", None):
            with raises(OptionError, repr(token), code="token_unknown"):
                demo.stream_tokens([3, token])  # type: ignore[list-item]

    @pytest.mark.parametrize("tokens", [2, None, "files", [1.5], [-1], [10**30], [[1]]], ids=repr)
    def test_tokens_that_are_not_token_ids(self, demo: Runtime, tokens: Any) -> None:
        code = "token_unknown" if isinstance(tokens, list | str) else ""
        with raises(OptionError, "token IDs", code=code):
            demo.stream_tokens(tokens)

    @pytest.mark.parametrize("tools", [(), (NOW,)])
    def test_advice_names_a_larger_context_only_if_it_can_be_used(
        self, tools: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def advice(words: int) -> str:
            with pytest.raises(ContextFullError) as caught:
                runtime.stream_messages([Message("user", "many words " * words)], tools=tools)
            assert str(caught.value).endswith(caught.value.next_step)
            assert ",," not in caught.value.next_step
            return caught.value.next_step

        options: Any = {"context": 256, "threads": 1, "exactness": "off", "prefix_cache": "none"}
        with edgespec.load("demo", "none", **options) as runtime:
            plan, trained = runtime.plan, runtime.target.trained_context_tokens
            assert plan is not None
            assert advice(130).endswith(" or use --context 1024")
            # A larger context than the model was trained for is not advised, even if the prompt then has less
            # room for the reply.
            assert advice(300).endswith(f" or use --context {trained}")
            assert f"trained for at most {trained:,} tokens" in advice(600)
            assert "--context" not in advice(600)
            tight = replace(plan, budget=replace(plan.budget, bytes=plan.planned_bytes("memory")))
            monkeypatch.setattr(runtime, "plan", tight)
            assert advice(130).endswith(", or raise --memory and use --context 1024")

    def test_a_prompt_larger_than_the_context(self, demo: Runtime) -> None:
        with raises(ContextFullError, "1,024"):
            demo.generate("many words " * 5000)
        with raises(ContextFullError, "1,024"):
            demo.chat().ask("many words " * 5000)

    @pytest.mark.long
    def test_a_prompt_as_large_as_the_context_gets_one_token(self, demo: Runtime) -> None:
        replies = {
            _drained(demo.stream_tokens([9] * 1024, method=method, seed=1)).tokens
            for method in ("none", *METHODS)
        }
        (tokens,) = replies
        assert len(tokens) == 1

    def test_methods_that_need_a_draft(self) -> None:
        with edgespec.load("demo", draft="none") as alone:
            assert alone.method.effective == "suffix"
            assert alone.draft is None
            with raises(OptionError, "a draft", code="method_unavailable", option="method"):
                alone.generate(HOWTO, method="model")
            assert alone.generate(HOWTO, max_tokens=5).method.effective in ("suffix", "none")
            assert alone.generate(HOWTO, max_tokens=5, method="suffix").method.effective == "suffix"

    def test_progress_of_the_prefill_may_cancel(self, demo: Runtime) -> None:
        tokens = demo.vocabulary.tokenize("unheard of " * 50, special=False, start=True)
        stream = demo.stream_tokens(tokens, progress=lambda what, fraction: False)
        assert list(stream) == []
        assert stream.reply.finish_reason == "cancelled"

    def test_invalid_options_raise_when_loading(self) -> None:
        for options in (
            {"draft_length": 0},
            {"draft_length": 65},
            {"method": "modle"},
            {"acceptance": "maybe"},
            {"draft_branches": (0,)},
            {"draft_confidence": 1.0},
            {"context": 0},
            {"threads": -1},
            {"kv_type": "f8"},
            {"flash_attention": "perhaps"},
        ):
            with pytest.raises(OptionError) as caught:
                edgespec.load("demo", **options)
            assert "\n" not in str(caught.value)


class TestReports:
    def test_reply_to_json_has_the_documented_keys(self, demo: Runtime) -> None:
        reply = demo.generate(HOWTO, max_tokens=24, seed=3, method="model+ngram", draft_length=3)
        json = reply.to_json()
        assert set(json) == {
            "text", "reasoning", "answer", "tokens", "finish_reason", "seed", "target", "draft", "method",
            "stats", "heads", "exactness",
        }  # fmt: skip
        method: Any = json["method"]
        assert (method.pop("note"), method.pop("gain"), method.pop("gain_uncertainty")) == ("", None, None)
        assert method.pop("loss_limits") is None
        assert method == {"requested": "model+ngram", "effective": "model+ngram", "reason": "as requested"}
        assert (json["target"], json["draft"], json["seed"]) == ("demo", "demo-draft", 3)
        stats: Any = json["stats"]
        assert set(stats) == {
            "prompt_tokens", "cached_prompt_tokens", "generated_tokens", "prompt_pass_tokens",
            "target_passes", "drafted_tokens",
            "accepted_tokens", "accepted_per_position", "drafted_per_position", "acceptance_rate",
            "tokens_per_target_pass", "draft_seconds", "verify_seconds", "rollback_seconds",
            "sampling_seconds", "overhead_seconds", "prefill_seconds", "growth_seconds",
            "ttft_seconds", "tpot_seconds", "tokens_per_second", "speedup_estimate", "draft_weight_bytes",
            "draft_kv_bytes",
            "draft_other_bytes",
            "peak_memory_bytes", "threads", "busy_passes", "shared_passes",
            "plain_seconds_estimate", "ledger_credit_seconds", "worst_case_loss",
        }  # fmt: skip

    @pytest.mark.parametrize("method", ["none", *METHODS])
    def test_the_counts_add_up(self, demo: Runtime, method: str) -> None:
        stream = demo.stream(REPEATS, max_tokens=40, seed=3, method=method, draft_length=4)
        pieces = list(stream)
        reply, stats = stream.reply, stream.stats
        assert "".join(piece.text for piece in pieces) == reply.text
        assert sum(piece.token_count for piece in pieces) == len(reply.tokens) == stats.generated_tokens
        assert sum(p.token_count for p in pieces if p.accepted) == stats.accepted_tokens
        assert sum(stats.accepted_per_position) == stats.accepted_tokens
        assert sum(stats.drafted_per_position) == stats.drafted_tokens
        assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
        assert (
            stats.target_passes + stats.accepted_tokens >= stats.decoded_tokens == stats.generated_tokens - 1
        )
        if method == "none":
            assert stats.drafted_tokens == 0
            assert stats.acceptance_rate is None
            assert stats.target_passes == stats.decoded_tokens

    def test_live_stats_can_be_read_while_it_runs(self, demo: Runtime) -> None:
        stream = demo.stream(HOWTO, max_tokens=30, seed=1)
        seen = [stream.stats.generated_tokens for _ in stream]
        assert seen == sorted(seen)
        assert seen[-1] == len(stream.reply.tokens)


class TestTemplates:
    def test_broken_template_raises_only_when_it_is_needed(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "broken.gguf", template="{% for message in messages %}")
        with edgespec.load(str(path), None) as runtime:
            assert len(runtime.generate("the file", raw=True, max_tokens=3).tokens) <= 3
            for call in (lambda: runtime.generate("the file"), runtime.chat):
                with raises(TemplateError, "broken"):
                    call()

    def test_model_without_template_takes_raw_prompts(self, tmp_path: Path) -> None:
        path = write_llama(tmp_path / "base.gguf", template=None)
        with edgespec.load(str(path), None) as runtime:
            assert not runtime.target.chat_template
            runtime.generate("the file", max_tokens=3)
            with raises(TemplateError, code="template_missing"):
                runtime.chat()
            with raises(TemplateError, code="template_missing"):
                runtime.generate("the file", system="Be brief.")

    @pytest.mark.long
    def test_characters_split_over_tokens_are_decoded(self, tmp_path: Path) -> None:
        """Random weights give random bytes, whose text must be the same in chunks and at once."""
        path = write_llama(tmp_path / "bytes.gguf", template=CHATML)
        with edgespec.load(str(path), None) as runtime:
            for seed in range(20):
                stream = runtime.stream("é🙂", max_tokens=60, seed=seed, temperature=2.0, top_k=0, top_p=1.0)
                text = "".join(piece.text for piece in stream)
                said = b"".join(runtime.vocabulary.piece(token) for token in stream.reply.tokens)
                assert text == stream.reply.text == said.decode("utf-8", "replace")


@pytest.mark.parametrize("make_copy", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_runtime_cannot_be_copied(demo: Runtime, make_copy: Callable[[object], object]) -> None:
    with raises(CapabilityError, "copied"):
        make_copy(demo)
    with raises(CapabilityError, "copied"):
        pickle.dumps(demo.chat())


@pytest.mark.long
def test_the_defaults_that_depend_on_the_models() -> None:
    with edgespec.load("demo", threads=1, context=512, acceptance="rejection") as pair:
        lengths = {
            method: pair.reply_defaults(method)["draft_length"] for method in ("auto", "suffix", "none")
        }
        assert lengths == {"auto": 16, "suffix": 4, "none": 0}
        defaults = pair.reply_defaults()
        assert (defaults["method"], defaults["acceptance"], defaults["max_tokens"]) == (
            "auto",
            "rejection",
            512,
        )
        with pytest.raises(OptionError):
            pair.reply_defaults("lowbit")
    with edgespec.load("demo", "none", threads=1, context=512, draft_length=6) as pair:
        assert pair.reply_defaults()["draft_length"] == 6


@pytest.mark.long
def test_a_new_stream_does_not_run_the_drafters_of_a_running_reply() -> None:
    """The first session may be generating a reply while another one is prepared."""
    with edgespec.load("demo", context=1024, parallel=2) as runtime:
        sessions: Any = runtime._sessions.sessions

        def controllers() -> set[object]:
            return {
                controller for session in sessions for controller in session.drafters._controllers.values()
            }

        before = controllers()
        # The controller of constrained replies is created on first use, which runs the draft model.
        stream = runtime.stream(HOWTO, choice=["yes", "no"])
        assert controllers() == before
        assert stream.wait().text in ("yes", "no")
        assert controllers() > before


@pytest.mark.long
@pytest.mark.parametrize(
    "place", ["a file in place of the folder", "a folder without permission", "/proc/cache"]
)
def test_one_note_says_that_nothing_is_saved(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    if place.startswith("/"):
        folder = Path(place)
    elif "file" in place:
        folder.write_text("")
    else:
        folder.mkdir()
        # Root may write anywhere, so this refuses it too.
        monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(folder))
    with edgespec.load("demo", "none", context=256, threads=1) as runtime:
        assert runtime.target.notice.count("measures the models again every time it starts") == 1
        assert f"because {folder}" in runtime.target.notice
        assert runtime.generate("Hi", max_tokens=4).tokens


def test_a_writable_folder_needs_no_note() -> None:
    with edgespec.load("demo", "none", context=256, threads=1) as runtime:
        assert "every time it starts" not in runtime.target.notice
