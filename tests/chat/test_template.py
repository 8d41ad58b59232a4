"""Chat templates: rendering, earlier reasoning, the sandbox, and errors."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import edgespec
from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.chat.template_quirks import SourceQuirks
from edgespec.chat.template_worker import compile_template
from edgespec.errors import CancelledError, ClosedError, TemplateError
from tests.backends.tiny_models import CHATML
from tests.cases import first
from tests.raising import raises
from tests.reasoning_templates import DEEPSEEK_R1, GLM_4_7, GPT_OSS, LING_3, MAGISTRAL, QWEN_3, SEED_OSS

USER = Message("user", "Hello")
TEXT = "{{ messages[0].content }}"
SYSTEM = Message("system", "Be brief.")
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def render(source: str, *messages: Message) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages)


class TestRendering:
    def test_what_templates_use(self) -> None:
        source = (
            "{{ bos_token }}{%- for m in messages %}\n"
            "  {%- if loop.first and m.role == 'system' %}{% continue %}{% endif %}\n"
            "  {{- m['content'] | trim }}{{ eos_token }}\n"
            "{%- endfor %}{% if add_generation_prompt %}>{% endif %}{{ {'ä': 1} | tojson }}"
        )
        assert render(source, Message("user", "  Hi ")) == '<s>Hi</s>>{"ä": 1}'

    def test_what_templates_written_for_transformers_use(self) -> None:
        template = ChatTemplate(
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
            "{{ {'b': 'ä', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
            "",
            "",
        )
        assert template.render([Message("user", "hi")]) == r'hi{"a":1,"b":"\u00e4"}'
        template.close()

    def test_template_can_use_the_date(self) -> None:
        assert render("{{ strftime_now('%Y') }}" + TEXT, Message("user", "1")).isdigit()

    def test_a_template_without_a_system_role_gets_the_instructions_with_the_first_message(self) -> None:
        assert render(NO_SYSTEM, SYSTEM, USER) == "[user]Be brief.\n\nHello"
        answered = (SYSTEM, USER, Message("assistant", "Hi"), Message("user", "More"))
        assert render(NO_SYSTEM, *answered) == "[user]Be brief.\n\nHello[assistant]Hi[user]More"

    def test_a_template_without_a_system_role_gets_the_only_message_as_a_user_message(self) -> None:
        assert render(NO_SYSTEM, SYSTEM) == "[user]Be brief."

    def test_a_template_without_later_system_messages_gets_them_as_user_messages(self) -> None:
        only_first = (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
            "[{{ m.role }}]{{ m.content }}{% endfor %}"
        )
        note, answer = Message("system", "Use metres."), Message("assistant", "Hi")
        start = "[system]Be brief.[user]Hello"
        assert render(only_first, SYSTEM, USER, answer, note, USER) == (
            f"{start}[assistant]Hi[user]Use metres.\n\nHello"
        )
        assert render(only_first, SYSTEM, USER, note, note) == f"{start}\n\nUse metres.\n\nUse metres."
        assert render(only_first, SYSTEM, note, USER) == "[system]Be brief.\n\nUse metres.[user]Hello"
        assert render(only_first, USER, answer, note) == "[user]Hello[assistant]Hi[user]Use metres."
        assert render(only_first, USER, USER, note) == "[user]Hello[user]Hello\n\nUse metres."
        assert render(NO_SYSTEM, SYSTEM, USER, answer, note, USER) == (
            "[user]Be brief.\n\nHello[assistant]Hi[user]Use metres.\n\nHello"
        )

    def test_content_is_not_a_template(self) -> None:
        assert render("{{ messages[0].content }}", Message("user", "{{ bos_token }}")) == "{{ bos_token }}"


class TestTrouble:
    @pytest.mark.parametrize(
        "source", ["{% for m in messages %}", "{{ ", "{% unknown %}", "{{ 1 | nofilter }}"]
    )
    def test_template_that_does_not_compile_raises(self, source: str) -> None:
        with raises(TemplateError, "broken") as caught:
            render(source, USER)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception('no') }}",
            "{{ messages[7].content }}",
            "{{ nothing.at.all }}",
            "{{ 1 // 0 }}",
            "{{ 'a' + 1 }}",
            "{{ messages | tojson | int + {} }}",
            NO_SYSTEM + "{{ raise_exception('always') }}",
        ],
    )
    def test_template_that_rejects_the_messages_raises(self, source: str) -> None:
        for messages in ([USER], [SYSTEM, USER]):
            with raises(TemplateError, "rejects") as caught:
                render(source, *messages)
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.__init__.__globals__ }}",
            "{{ cycler.__init__.__globals__.os }}",
            "{{ messages.append(1) }}",
            "{{ raise_exception.__globals__.sys }}",
        ],
    )
    def test_template_cannot_leave_the_sandbox(self, source: str) -> None:
        with pytest.raises(TemplateError):
            render(source, USER)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(s='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
)
# Some of these templates exceed one limit or another, depending on the machine.
HOSTILE = {
    "a long number": "{{ (10**5000)|string }}",
    "a huge power": "{{ 10**(10**10) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros that call each other": (
        "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}"
    ),
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "nested ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "nested loops": ENDLESS,
    "a long string": "{{ 'a' * 4000000000 }}",
    "a long string of the message": "{{ messages[0].content * 4000000000 }}",
    "doubling": DOUBLING,
    "doubling with join": DOUBLING.replace("n.s ~ n.s", "[n.s, n.s]|join"),
    "a long prompt": "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    "a syntax error": "{{ 'x",
    "raise_exception": "{{ raise_exception('no') }}",
    "a long error": "{{ raise_exception('no' * 9999999) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "center": "{{ 'x'|center(10**9) }}",
    "indent": "{{ ('x\\n' * 10**6)|indent(10**6) }}",
    "format": "{{ '%2000000000d'|format(1) }}",
    "wordwrap": "{{ ('x' * 10**8)|wordwrap(1) }}",
    "many characters": "{{ '{:>2000000000}'.format(1) }}",
}


@pytest.mark.usefixtures("template_process")
class TestLimits:
    @pytest.mark.long
    @pytest.mark.parametrize("source", first(HOSTILE.values(), 5), ids=HOSTILE)
    def test_hostile_templates_raise_soon_and_do_not_end_the_chat(self, source: str) -> None:
        template = ChatTemplate(source, "<s>", "</s>")
        began = time.monotonic()
        with raises(TemplateError) as caught:
            template.render([USER])
        assert time.monotonic() - began < 30
        assert len(str(caught.value)) < 600
        assert caught.value.next_step
        template.close()

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("{{ 'a' * 4000000000 }}", "than 512"),
            ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "the rendered prompt exceeds"),
            (HOSTILE["nested brackets"], "nested too deeply"),
            (HOSTILE["nested ifs"], "nested too deeply"),
            (HOSTILE["a macro without end"], "nested too deeply"),
            ("{{ (10**5000)|string }}", "integer"),
        ],
    )
    def test_the_error_says_which_limit_and_what_to_do(self, source: str, reason: str) -> None:
        with raises(TemplateError, reason) as caught:
            render(source, USER)
        assert "edgespec generate --raw" in caught.value.next_step

    @pytest.mark.long
    def test_only_some_messages_may_be_hostile(self) -> None:
        template = ChatTemplate("{% if messages|length > 1 %}" + ENDLESS + "{% endif %}" + TEXT, "", "")
        assert template.render([USER]) == "Hello"
        with raises(TemplateError, "than 2") as caught:
            template.render([USER, USER])
        assert "edgespec generate --raw" in caught.value.next_step
        assert template.render([USER]) == "Hello"

    def test_memory_is_measured_where_the_system_does_not_limit_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("edgespec.chat.template.memory_limit_bytes", lambda _: 1 << 20)
        with raises(TemplateError, "than 1.0"):
            render(ENDLESS, USER)

    def test_time_is_measured_while_the_process_sleeps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        template = ChatTemplate(TEXT, "", "")
        template.compile()
        child = _child(template)
        child.suspend()
        monkeypatch.setattr("edgespec.chat.template._MAX_POLLS", 4)
        with raises(TemplateError, "20 seconds"):
            template.render([USER])
        assert not child.is_running()
        monkeypatch.undo()
        assert template.render([USER]) == "Hello"


def _child(template: ChatTemplate) -> psutil.Process:
    assert template._process
    return psutil.Process(template._process._process.pid)


@pytest.mark.usefixtures("template_process")
class TestProcess:
    def test_it_renders_as_this_process_would(self) -> None:
        random.seed(1)
        characters = range(32, 0xD000)
        chat = [
            Message("user" if i % 2 == 0 else "assistant", "".join(map(chr, random.sample(characters, 9))))
            for i in range(21)
        ]
        chat.append(Message("user", "\ud800 \x00 \r\n\u2028 {{ x }} \U0001f600"))
        for source in (CHATML, "{{ bos_token }}{{ messages | tojson(indent=1) }}\r\n{{ '\ud800' }}\n"):
            variables = {
                "messages": [{"role": each.role, "content": each.content} for each in chat],
                "bos_token": "<s>",
            }
            expected = compile_template(source).render(add_generation_prompt=True, **variables)
            assert render(source, *chat) == expected

    def test_a_chat_of_5000_messages_stays_within_the_limits(self) -> None:
        chat = [Message("user" if i % 2 == 0 else "assistant", "several words " * 15) for i in range(5001)]
        assert len(render(CHATML, *chat)) > 5001 * 200

    @pytest.mark.long
    def test_a_prompt_of_many_megabytes_stays_within_the_limits(self) -> None:
        text = "é word" * 2_000_000 + "\U0001f600"
        assert render("{{ messages[0].content | trim }}", Message("user", text)) == text

    def test_several_threads_share_one_process(self) -> None:
        template = ChatTemplate("{{ messages[0].content }}", "", "")
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda i: template.render([Message("user", str(i))]), range(100)))
        assert texts == [str(i) for i in range(100)]
        template.close()

    def test_progress_cancels(self) -> None:
        template = ChatTemplate("{% if messages|length > 1 %}" + ENDLESS + "{% endif %}" + TEXT, "", "")
        template.compile()
        began = time.monotonic()
        with pytest.raises(CancelledError):
            template.render([USER, USER], progress=lambda _what, _fraction: False)
        assert time.monotonic() - began < 15
        assert template.render([USER]) == "Hello"

    def test_close_ends_it_also_while_it_renders(self) -> None:
        template = ChatTemplate("{% if messages|length > 1 %}" + ENDLESS + "{% endif %}" + TEXT, "", "")
        template.compile()
        child = _child(template)
        threading.Timer(0.2, template.close).start()
        with pytest.raises(ClosedError):
            template.render([USER, USER])
        assert not psutil.wait_procs([child], timeout=10)[1]
        with pytest.raises(ClosedError):
            template.render([USER])
        template.close()

    def test_close_ends_it_also_while_it_receives_a_long_chat(self) -> None:
        template = ChatTemplate(TEXT, "", "")
        template.compile()
        _child(template).suspend()
        threading.Timer(0.2, template.close).start()
        with pytest.raises(ClosedError):
            template.render([Message("user", "x" * 9_999_999)])

    @pytest.mark.long
    def test_garbage_collection_ends_it(self) -> None:
        template = ChatTemplate(TEXT, "", "")
        template.compile()
        child = _child(template)
        del template
        gc.collect()
        assert not child.is_running()

    def test_a_killed_process_is_replaced(self) -> None:
        template = ChatTemplate(TEXT, "", "")
        template.compile()
        _child(template).kill()
        _child(template).wait()
        assert template.render([USER]) == "Hello"

    @pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
    def test_ctrl_c_does_not_reach_it(self) -> None:
        template = ChatTemplate(TEXT, "", "")
        template.compile()
        assert os.getpgid(_child(template).pid) != os.getpgid(0)

    def test_it_runs_in_any_folder_and_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("jinja2", "json", "edgespec", "message"):
            (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert render(TEXT, USER) == "Hello"

    @pytest.mark.parametrize("executable", ["", "/nonexistent/python"])
    def test_without_an_interpreter_an_error_is_raised(
        self, executable: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", executable)
        with raises(TemplateError, code="process_not_started"):
            render("x", USER)

    @pytest.mark.long
    @pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
    @pytest.mark.parametrize("source", ["x", ENDLESS])
    def test_it_ends_with_its_parent(self, source: str) -> None:
        script = (
            "import sys, threading\n"
            f"sys.path.insert(0, {str(Path(edgespec.__file__).parents[1])!r})\n"
            "from edgespec.chat.template import ChatTemplate\n"
            "from edgespec.chat.message import Message\n"
            f"template = ChatTemplate({source!r}, '', '')\n"
            "template.compile()\n"
            "print(template._process._process.pid, flush=True)\n"
            "template.render([Message('user', 'x')])\n"
            "threading.Event().wait()\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout
            child = psutil.Process(int(parent.stdout.readline()))
            time.sleep(0.2)
            parent.send_signal(signal.SIGKILL)
        for _ in range(300):
            if not child.is_running() or child.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.1)
        raise AssertionError("the child process outlives its parent")


TALK = (Message("user", "Q1"), Message("assistant", "ANSWER", "REASONING"), Message("user", "Q2"))


@pytest.mark.long
@pytest.mark.parametrize("source", [QWEN_3, DEEPSEEK_R1, GLM_4_7, MAGISTRAL, GPT_OSS])
def test_templates_that_leave_earlier_reasoning_out(source: str) -> None:
    prompt = ChatTemplate(source, "<s>", "</s>").render(TALK)
    assert "ANSWER" in prompt
    assert "REASONING" not in prompt


@pytest.mark.parametrize(
    ("source", "reply"),
    [
        (LING_3, "<think>REASONING</think>ANSWER<|role_end|>"),
        (SEED_OSS, "<seed:think>REASONING</seed:think>\nANSWER<seed:eos>"),
    ],
)
def test_templates_that_keep_earlier_reasoning(source: str, reply: str) -> None:
    assert reply in ChatTemplate(source, "<s>", "</s>").render(TALK)


def test_a_message_without_reasoning_looks_as_before() -> None:
    """Templates tell a missing `reasoning_content` from an empty one."""
    without = SourceQuirks("").for_template(Message("assistant", "ANSWER"), "text")
    assert without == {"role": "assistant", "content": "ANSWER"}
    inline = Message("assistant", "<think>\nREASONING\n</think>\n\nANSWER")
    prompt = ChatTemplate(QWEN_3, "<s>", "</s>").render([TALK[0], inline, TALK[2]])
    assert "<|im_start|>assistant\nANSWER<|im_end|>" in prompt
    assert "REASONING" not in prompt


def test_the_first_message_keeps_its_place_without_a_system_role() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + LING_3
    prompt = ChatTemplate(source, "<s>", "</s>").render([Message("system", "S"), *TALK])
    assert "<role>HUMAN</role>S\n\nQ1<|role_end|>" in prompt
    assert "<think>REASONING</think>ANSWER" in prompt
