"""Chat templates: rendering, the sandbox, and errors."""

from __future__ import annotations

import pytest

from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.errors import TemplateError

USER = Message("user", "Hello")
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
        assert render(source, SYSTEM, Message("user", "  Hi ")) == '<s>Hi</s>>{"ä": 1}'

    def test_template_can_use_the_date(self) -> None:
        assert render("{{ strftime_now('%Y') }}", USER).isdigit()

    def test_a_template_without_a_system_role_gets_the_instructions_with_the_first_message(self) -> None:
        assert render(NO_SYSTEM, SYSTEM, USER) == "[user]Be brief.\n\nHello"
        answered = (SYSTEM, USER, Message("assistant", "Hi"), Message("user", "More"))
        assert render(NO_SYSTEM, *answered) == "[user]Be brief.\n\nHello[assistant]Hi[user]More"

    def test_content_is_not_a_template(self) -> None:
        assert render("{{ messages[0].content }}", Message("user", "{{ bos_token }}")) == "{{ bos_token }}"


class TestTrouble:
    @pytest.mark.parametrize(
        "source", ["{% for m in messages %}", "{{ ", "{% unknown %}", "{{ 1 | nofilter }}"]
    )
    def test_template_that_does_not_compile_raises(self, source: str) -> None:
        with pytest.raises(TemplateError, match="broken") as caught:
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
            with pytest.raises(TemplateError, match="rejects") as caught:
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
