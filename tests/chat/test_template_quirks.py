"""Conversations reach the prompt in full, whatever message format and order a template expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from edgespec.chat.message import Message
from edgespec.chat.template import ChatTemplate
from edgespec.chat.template_quirks import PROBE_TEXT, PROBES
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import TemplateError
from tests.raising import raises

Render: TypeAlias = Callable[[str, Sequence[Message]], str]

SYSTEM, USER, MORE = Message("system", "Be brief."), Message("user", "Hello"), Message("user", "And now?")
ANSWER, AGAIN = Message("assistant", "Hi."), Message("assistant", "How are you?")
CALLS = Message(
    "assistant", "", tool_calls=(ToolCall("call_1", "now", "{}"), ToolCall("call_2", "who", "{}"))
)
NOON = Message("tool", "noon", tool_call_id="call_1", name="now")
ADA = Message("tool", "Ada", tool_call_id="call_2", name="who")


def loop(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


def refuse(condition: str, reason: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('{reason}') }}}}{{% endif %}}"


CONTENT = "[{{ m.role }}]{{ m.content }}"
PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
FIRST_PART = "{{ m.content[0]['text'] }}"
ALTERNATE = refuse("(m.role == 'user') != (loop.index0 % 2 == 0)", "Conversation roles must alternate")
NO_SYSTEM = refuse("m.role == 'system'", "System role not supported")
STRICT = loop(ALTERNATE + NO_SYSTEM + CONTENT)
ALTERNATE_AFTER_SYSTEM = loop(
    "{% set at = loop.index0 - (1 if messages[0].role == 'system' else 0) %}"
    "{% if at >= 0 %}" + refuse("(m.role == 'user') != (at % 2 == 0)", "Roles must alternate") + "{% endif %}"
    "[{{ m.role }}]{{ m.content }}"
)
KNOWS_TOOLS = (
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or () %}({{ c.function.name }}){% endfor %}"
    "{% if m.role == 'tool' %}!{% endif %}"
)
TEXT_OR_CALLS = (
    "[{{ m.role }}]{% for c in m.tool_calls or () %}({{ c.function.name }})"
    "{% else %}{{ m.content }}{% endfor %}{% if m.role == 'tool' %}!{% endif %}"
)
# As in Mistral's templates, calls and results do not count.
ALTERNATE_WITHOUT_CALLS = (
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    + refuse("(m.role == 'user') != (n.at % 2 == 0)", "Roles must alternate")
    + "{% set n.at = n.at + 1 %}{% endif %}"
)
ONE_CALL = (
    "[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}({{ m.tool_calls[0].function.name }}){% endif %}"
    "{% if m.role == 'tool' %}!{% endif %}"
)
EMPTY = Message("assistant", "")
NO_EMPTY_REPLIES = refuse("m.role == 'assistant' and not (m.content or m.tool_calls)", "no text")
CALLED = (
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "who", "arguments": {}}\n</tool_call>'
)
RESULTS = "<tool_response>\nnoon\n</tool_response>\n\n<tool_response>\nAda\n</tool_response>"


@pytest.fixture
def render() -> Iterator[Render]:
    made: list[ChatTemplate] = []

    def render(source: str, messages: Sequence[Message]) -> str:
        made.append(ChatTemplate(source, "", ""))
        return made[-1].render(messages)

    yield render
    for template in made:
        template.close()


FORMS = {
    "text": CONTENT,
    "text, or else parts": "[{{ m.role }}]{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    + PARTS
    + "{% endif %}",
    "parts": "[{{ m.role }}]" + PARTS,
    "parts of any type": "[{{ m.role }}]{% for p in m.content %}{{ p['text'] }}{% endfor %}",
    "the first part": "[{{ m.role }}]" + FIRST_PART,
    "parts by a filter": "[{{ m.role }}]{{ m.content | selectattr('type', 'equalto', 'text')"
    " | map(attribute='text') | join('') }}",
    "parts with an error for text": "[{{ m.role }}]{{ m.content[0]['text'] + '' }}",
    "parts, and an error that says so": refuse("m.content is string", "content must be a list")
    + "[{{ m.role }}]"
    + FIRST_PART,
    "parts for the system prompt": "[{{ m.role }}]{% if m.role == 'system' %}"
    + FIRST_PART
    + "{% else %}{{ m.content }}{% endif %}",
    "parts for the user": "[{{ m.role }}]{% if m.role == 'user' %}"
    + PARTS
    + "{% else %}{{ m.content }}{% endif %}",
    "parts for replies": "[{{ m.role }}]{% if m.role == 'assistant' %}"
    + PARTS
    + "{% else %}{{ m.content + '' }}{% endif %}",
}


@pytest.mark.long
@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
def test_every_text_has_the_form_that_the_template_reads(render: Render, body: str) -> None:
    talk = [SYSTEM, USER, ANSWER, MORE]
    assert render(loop(body), talk) == "[system]Be brief.[user]Hello[assistant]Hi.[user]And now?"
    assert render(loop(body), [USER]) == "[user]Hello"


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ("{{ m.content|title }}", "Hello There"),
        ("{{ m.content|upper }}", "HELLO THERE"),
        ("{{ m.content|capitalize }}", "Hello there"),
        ("{{ m.content[0]['text']|upper }}", "HELLO THERE"),
        ("{{ m.content|tojson }}", '"hello there"'),
    ],
)
def test_a_template_can_change_the_text(render: Render, body: str, prompt: str) -> None:
    assert render(loop(body), [Message("user", "hello there")]) == prompt


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        # Neighbours of one role.
        (STRICT, [USER, MORE], "[user]Hello\n\nAnd now?"),
        (STRICT, [SYSTEM, USER, MORE], "[user]Be brief.\n\nHello\n\nAnd now?"),
        (STRICT, [USER, ANSWER, AGAIN, MORE], "[user]Hello[assistant]Hi.\n\nHow are you?[user]And now?"),
        (STRICT, [USER, ANSWER, USER, MORE], "[user]Hello[assistant]Hi.[user]Hello\n\nAnd now?"),
        (ALTERNATE_AFTER_SYSTEM, [SYSTEM, USER, MORE], "[system]Be brief.[user]Hello\n\nAnd now?"),
        (ALTERNATE_AFTER_SYSTEM, [SYSTEM, SYSTEM, USER], "[system]Be brief.\n\nBe brief.[user]Hello"),
        (loop(CONTENT), [USER, MORE], "[user]Hello[user]And now?"),
        # Calls and results, which such templates get as text.
        (STRICT, [USER, CALLS, NOON, ADA], f"[user]Hello[assistant]{CALLED}[user]{RESULTS}"),
        (
            STRICT, [USER, CALLS, NOON, ADA, MORE],
            f"[user]Hello[assistant]{CALLED}[user]{RESULTS}\n\nAnd now?",
        ),
        (
            loop(KNOWS_TOOLS), [USER, CALLS, NOON, ADA],
            "[user]Hello[assistant](now)(who)[tool]noon![tool]Ada!",
        ),
        (
            loop(ALTERNATE + KNOWS_TOOLS), [USER, CALLS, NOON, ADA],
            f"[user]Hello[assistant]{CALLED}[user]{RESULTS}",
        ),
        (
            loop(refuse("m.role == 'tool'", "no tools") + KNOWS_TOOLS), [USER, CALLS, NOON],
            f"[user]Hello[assistant]{CALLED}[user]<tool_response>\nnoon\n</tool_response>",
        ),
        # Mistral's templates want a result for each call.
        (
            loop(
                refuse("m.tool_calls and messages[loop.index0 + 1].role != 'tool'", "no result") + KNOWS_TOOLS
            ),
            [USER, CALLS, MORE],
            f"[user]Hello[assistant]{CALLED}[user]And now?",
        ),
        # A template that names no role, for a model with tools and for one without.
        (
            "{% if tools %}{% endif %}" + loop(CONTENT), [USER, CALLS, NOON],
            f"[user]Hello[assistant]{CALLED}[tool]noon",
        ),
        (
            loop(CONTENT), [USER, CALLS, NOON],
            f"[user]Hello[assistant]{CALLED}[user]<tool_response>\nnoon\n</tool_response>",
        ),
        # Templates that leave out the text of a reply with calls.
        (
            loop(TEXT_OR_CALLS), [USER, replace(CALLS, content="Hi."), NOON, ADA],
            "[user]Hello[assistant]Hi.[assistant](now)(who)[tool]noon![tool]Ada!",
        ),
        (
            "{% set n = namespace(at=0) %}" + loop(ALTERNATE_WITHOUT_CALLS + TEXT_OR_CALLS),
            [USER, replace(CALLS, content="Hi."), NOON, ADA, ANSWER, MORE],
            f"[user]Hello[assistant]Hi.\n{CALLED}[user]{RESULTS}[assistant]Hi.[user]And now?",
        ),
        # Templates that show the last system message only.
        (
            "{{ (messages | selectattr('role', 'equalto', 'system') | list)[-1].content }}"
            + loop("{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}"),
            [SYSTEM, replace(SYSTEM, content="Be kind."), USER],
            "Be brief.\n\nBe kind.[user]Hello",
        ),
        # Templates that show one call of each message.
        (
            loop(ONE_CALL), [USER, CALLS, NOON, ADA],
            "[user]Hello[assistant](now)[tool]noon![assistant](who)[tool]Ada!",
        ),
        (
            loop(ONE_CALL), [USER, CALLS, ADA, NOON, MORE],
            "[user]Hello[assistant](now)[tool]noon![assistant](who)[tool]Ada![user]And now?",
        ),
        (
            loop(ONE_CALL), [USER, CALLS, replace(ADA, tool_call_id=""), replace(NOON, tool_call_id="")],
            "[user]Hello[assistant](now)[tool]Ada![assistant](who)[tool]noon!",
        ),
        (
            loop(ONE_CALL), [USER, CALLS, NOON, MORE],
            "[user]Hello[assistant](now)[tool]noon![assistant](who)[user]And now?",
        ),
        # Replies without text, which Mistral's templates reject.
        (loop(NO_EMPTY_REPLIES + CONTENT), [USER, EMPTY, MORE], "[user]Hello[user]And now?"),
        (loop(ALTERNATE + NO_EMPTY_REPLIES + CONTENT), [USER, EMPTY, MORE], "[user]Hello\n\nAnd now?"),
        (loop(CONTENT), [USER, EMPTY, MORE], "[user]Hello[assistant][user]And now?"),
        # A result whose text the template leaves out.
        (
            loop("{% if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endif %}"),
            [USER, NOON], "[user]Hello[user]<tool_response>\nnoon\n</tool_response>",
        ),
        # A user message must come first.
        (STRICT, [ANSWER, USER], "[user][assistant]Hi.[user]Hello"),
        (STRICT, [SYSTEM, ANSWER, USER], "[user]Be brief.[assistant]Hi.[user]Hello"),
        (ALTERNATE_AFTER_SYSTEM, [SYSTEM, ANSWER, USER], "[user]Be brief.[assistant]Hi.[user]Hello"),
        # System messages that the template refuses or leaves out.
        (STRICT, [SYSTEM, USER], "[user]Be brief.\n\nHello"),
        (STRICT, [USER, ANSWER, SYSTEM, MORE], "[user]Hello[assistant]Hi.[user]Be brief.\n\nAnd now?"),
        (
            loop("{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}"),
            [SYSTEM, USER, ANSWER, SYSTEM, MORE],
            "[user]Be brief.\n\nHello[assistant]Hi.[user]Be brief.\n\nAnd now?",
        ),
        (
            loop("{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}"),
            [SYSTEM, USER, ANSWER, SYSTEM, MORE],
            "[system]Be brief.[user]Hello[assistant]Hi.[user]Be brief.\n\nAnd now?",
        ),
        # Several of these at once.
        (
            STRICT.replace("{{ m.content }}", PARTS), [SYSTEM, USER, MORE, CALLS, NOON, ADA],
            f"[user]Be brief.\n\nHello\n\nAnd now?[assistant]{CALLED}[user]{RESULTS}",
        ),
    ],
)  # fmt: skip
def test_messages_have_the_order_that_the_template_accepts(
    render: Render, source: str, messages: list[Message], prompt: str
) -> None:
    assert render(source, messages) == prompt


THOUGHT = Message("assistant", "Hi.", reasoning="Hm.")
THOUGHT_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}{{ '[THINK]' + p['thinking'] }}{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ("{{ m.reasoning_content }}{{ m.content }}", "HelloHm.Hi.And now?"),
        ("{{ m.reasoning }}{{ m.content }}", "HelloHm.Hi.And now?"),
        ("{{ m['thinking'] }}{{ m.content }}", "HelloHm.Hi.And now?"),
        ("{{ m.get('thinking') or '' }}{{ m.content }}", "HelloHm.Hi.And now?"),
        ("{{ m.thinking or m.reasoning_content }}{{ m.content }}", "HelloHm.Hi.And now?"),
        (THOUGHT_PARTS, "Hello[THINK]Hm.Hi.And now?"),
    ],
)
def test_earlier_reasoning_is_where_the_template_reads_it(render: Render, body: str, prompt: str) -> None:
    assert render(loop(body), [USER, THOUGHT, MORE]) == prompt


def test_reasoning_that_the_template_refuses_next_to_text_is_left_out(render: Render) -> None:
    source = loop(
        refuse("m.tool_calls and m.content and m.thinking", "Cannot pass both content and thinking")
        + "{{ m.thinking }}"
        + KNOWS_TOOLS
    )
    begin = "[user]Hello"
    for content, prompt in (("", "Hm.[assistant](now)(who)"), ("Hi.", "[assistant]Hi.(now)(who)")):
        called = replace(CALLS, content=content, reasoning="Hm.")
        assert render(source, [USER, called, NOON, ADA]) == f"{begin}{prompt}[tool]noon![tool]Ada!"


@pytest.mark.parametrize(
    ("source", "messages", "kind"),
    [
        (loop("[{{ m.role }}]{{ m.text }}"), [USER], "user"),
        (loop("[{{ m.role }}]"), [SYSTEM, USER], "system"),
        ("{{ messages[0].content }}", [USER, ANSWER, MORE], "assistant"),
        (loop("{% if m.role == 'user' %}{{ m.content }}{% endif %}"), [USER, ANSWER, MORE], "assistant"),
    ],
)
def test_a_text_that_cannot_reach_the_prompt_is_an_error(
    render: Render, source: str, messages: list[Message], kind: str
) -> None:
    with raises(TemplateError, kind) as caught:
        render(source, messages)
    assert "--raw" in caught.value.next_step


@pytest.mark.parametrize(
    ("source", "messages", "remedy"),
    [
        ("{{ foo.bar }}", [USER], "--raw"),
        ("{{ foo.bar }}", [SYSTEM, USER, ANSWER, MORE], "--raw"),
        (loop("{{ m.content + 5 }}"), [USER], "--raw"),
        (loop(refuse("true", "closed")), [USER, ANSWER, MORE], "--raw"),
        (loop(refuse("'Hello' in m.content", "no greetings") + CONTENT), [USER], "change or shorten"),
        (
            loop(refuse("messages[0].role != 'system'", "no system") + CONTENT),
            [USER, MORE],
            "change or shorten",
        ),
        (loop(refuse("loop.index > 2", "too long") + CONTENT), [USER, ANSWER, MORE], "change or shorten"),
    ],
)
def test_an_error_says_whether_another_chat_can_help(
    render: Render, source: str, messages: list[Message], remedy: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source, messages)
    assert remedy in caught.value.next_step


def test_the_prompt_of_a_growing_chat_keeps_its_beginning() -> None:
    template = ChatTemplate(STRICT, "", "")
    chat = [SYSTEM, USER, MORE, CALLS, NOON, ADA, ANSWER, USER, ANSWER, SYSTEM, MORE]
    before = ""
    for end in range(2, len(chat) + 1):
        if chat[end - 1].role in ("assistant", "system"):
            continue
        prompt = template.render(chat[:end])
        assert prompt.startswith(before)
        before = prompt
    template.close()


def test_a_template_is_probed_once_for_each_kind_of_message(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(loop(CONTENT), "", "")
    asked: list[object] = []
    ask = template._ask

    def counted(process: Any, request: Any, progress: Any) -> Any:
        asked.append(request)
        return ask(process, request, progress)

    monkeypatch.setattr(template, "_ask", counted)
    for _ in range(3):
        template.render([SYSTEM, USER, ANSWER, replace(USER, content="Why?")])
    probes = [request for request in asked if PROBE_TEXT in str(request)]
    assert len(probes) == 3 < len(PROBES)
    assert len(asked) == len(probes) + 3 + 1  # The first request compiles the template.
    template.close()
