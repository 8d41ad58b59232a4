"""Trailing assistant messages of a request are continued in full, or rejected, with every API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.reasoning_templates import OPENS_REASONING
from tests.server.conftest import MESSAGES, running

CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose model must reason, because its chat template opens the reasoning."""
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "reasoner", "llama")
    _set_template(folder, OPENS_REASONING)
    options = {"method": "ngram", "context": 1024}
    with (
        running(threads=None, target=str(folder), draft="none", load_options=options) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def _set_template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))


def ask(http: httpx.Client, api: str, last: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Send a request through one of the APIs. Return the answer, the reasoning and the prompt token count.

    Args:
        http: The client.
        api: The path of the API.
        last: The `content`, `reasoning` and `calls` of the last message.
        options: Options of the reply, under edgespec's names.
    """
    content, reasoning, calls = (last.get(name) for name in ("content", "reasoning", "calls"))
    body: dict[str, Any] = {"seed": 1, "max_tokens": 24, **options}
    if api == "/v1/messages":
        blocks: list[Any] = (
            [{"type": "thinking", "thinking": reasoning, "signature": ""}] if reasoning else []
        )
        blocks += [{"type": "text", "text": content}] if content else []
        blocks += [{"type": "tool_use", "id": "call_1", "name": "now", "input": {}}] if calls else []
        body["messages"] = [*MESSAGES, {"role": "assistant", "content": blocks}]
    elif api == "/v1/responses":
        items: list[Any] = [{"type": "message", **MESSAGES[0]}]
        if reasoning:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]})
        if content:
            items.append({"type": "message", "role": "assistant", "content": content})
        if calls:
            items.append({"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"})
        body |= {"input": items, "max_output_tokens": body.pop("max_tokens")}
    else:
        key = "thinking" if api == "/api/chat" else "reasoning_content"
        message = {"role": "assistant", "content": content or "", key: reasoning or ""}
        body["messages"] = [*MESSAGES, {**message, **({"tool_calls": [CALL]} if calls else {})}]
    if api == "/api/chat":
        names = {"max_tokens": "num_predict"}
        body = {
            "messages": body.pop("messages"),
            "stream": False,
            "options": {names.get(key, key): value for key, value in body.items()},
        }
    response = http.post(api, json=body)
    result = response.json()
    if response.status_code != 200:
        return {"status": response.status_code, "error": json.dumps(result)}
    if api == "/v1/messages":
        parts = [(part["type"], part.get("text") or part.get("thinking") or "") for part in result["content"]]
        parts = [("reasoning" if kind == "thinking" else "answer", text) for kind, text in parts]
        read = result["usage"].get("cache_read_input_tokens") or 0
        return {**dict(parts), "prompt": result["usage"]["input_tokens"] + read}
    if api == "/v1/responses":
        parts = [
            (
                "reasoning" if item["type"] == "reasoning" else "answer",
                "".join(p["text"] for p in item["content"]),
            )
            for item in result["output"]
        ]
        return {**dict(parts), "prompt": result["usage"]["input_tokens"]}
    if api == "/api/chat":
        message, prompt = result["message"], result["prompt_eval_count"]
        return {"answer": message["content"], "reasoning": message.get("thinking", ""), "prompt": prompt}
    message, prompt = result["choices"][0]["message"], result["usage"]["prompt_tokens"]
    reasoning = message.get("reasoning_content") or ""
    return {"answer": message["content"] or "", "reasoning": reasoning, "prompt": prompt}


APIS = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"]


@pytest.mark.parametrize("api", APIS)
class TestReasoningThatThePromptOpens:
    @pytest.mark.long
    def test_an_answer_is_continued_as_an_answer(self, reasoner: httpx.Client, api: str) -> None:
        reply = ask(reasoner, api, {"content": "Use `ls"}, choice=["Use `ls -l`"])
        assert (reply["answer"], reply.get("reasoning", "")) == (" -l`", "")

    @pytest.mark.long
    def test_reasoning_is_continued_as_reasoning(self, reasoner: httpx.Client, api: str) -> None:
        reply = ask(reasoner, api, {"reasoning": "The user wants files by size."})
        assert (reply.get("answer", ""), reply["reasoning"] != "") == ("", True)
        assert reply["prompt"] > ask(reasoner, api, {"reasoning": "The"})["prompt"]

    @pytest.mark.long
    def test_an_answer_after_reasoning_keeps_both(self, reasoner: httpx.Client, api: str) -> None:
        last = {"content": "Use `ls", "reasoning": "The user wants files by size."}
        reply = ask(reasoner, api, last, choice=["Use `ls -l`"])
        assert (reply["answer"], reply.get("reasoning", "")) == (" -l`", "")
        without = ask(reasoner, api, {"content": "Use `ls"}, choice=["Use `ls -l`"])
        assert reply["prompt"] > without["prompt"]

    def test_json_is_continued_as_json(self, reasoner: httpx.Client, api: str) -> None:
        schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [5]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        reply = ask(reasoner, api, {"content": "{"}, schema=schema)
        assert json.loads("{" + reply["answer"]) == {"a": 5}

    def test_calls_without_results_are_refused(self, reasoner: httpx.Client, api: str) -> None:
        for last in ({"calls": True}, {"calls": True, "content": "I look.", "reasoning": "Hm."}):
            refused = ask(reasoner, api, last)
            assert refused["status"] == 400
            assert "'now'" in refused["error"]

    @pytest.mark.long
    def test_stop_strings_do_not_end_the_reasoning(self, reasoner: httpx.Client, api: str) -> None:
        stop = {"/v1/messages": "stop_sequences"}.get(api, "stop")
        last = {"reasoning": "The user"}
        reasoning = ask(reasoner, api, last)["reasoning"]
        letters = [letter for letter in dict.fromkeys(reasoning) if letter.isalpha()][:4]
        assert letters
        assert ask(reasoner, api, last, **{stop: letters})["reasoning"] == reasoning


@pytest.mark.long
@pytest.mark.parametrize("api", APIS)
def test_a_reply_cut_within_a_character_is_continued(reasoner: httpx.Client, api: str) -> None:
    text = "🙂日 ok"
    for cut in range(len(text.encode())):
        start = text.encode()[:cut].decode("utf-8", "replace")
        reply = ask(reasoner, api, {"content": f"A {start}"}, choice=[f"A {text}"])
        assert f"A {start}".rstrip("\ufffd") + reply["answer"] == f"A {text}"


def test_two_assistant_messages_are_parts_of_one_reply(reasoner: httpx.Client) -> None:
    parts = [{"role": "assistant", "content": part} for part in ("Use", " `ls")]
    body = {"messages": [*MESSAGES, *parts], "choice": ["Use `ls -l`"], "max_tokens": 24}
    for path in ("/v1/chat/completions", "/v1/messages"):
        result = reasoner.post(path, json=body).json()
        message = result["choices"][0]["message"] if "choices" in result else result
        assert " -l`" in json.dumps(message["content"])
