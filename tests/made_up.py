"""Expected behaviour of the command line with a method `parrot` that only a test registers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from edgespec.cli.program import program

__all__ = ["PROMPT", "check_commands"]

PROMPT = "How do I list files by size?"


def check_commands(prompts: Path, text: str, *options: str) -> None:
    """Generate, verify and measure replies that the method drafts.

    Args:
        prompts: File to write the prompt to verify to.
        text: The prompt.
        *options: The options that load the model.
    """
    prompts.write_text(json.dumps({"prompt": text}) + "\n")

    def run(*args: str) -> dict[str, Any]:
        result = CliRunner().invoke(program, [*args, *options, "--json"])
        assert result.exit_code == 0, result.output
        value: dict[str, Any] = json.loads(result.stdout)
        return value

    assert run("generate", PROMPT, "-n", "20", "--method", "parrot")["method"]["effective"] == "parrot"
    verified = ("--max-tokens", "16", "--temperatures", "0,1", "--draft-lengths", "4")
    proof = run("verify", "--prompts", str(prompts), *verified, "--methods", "parrot,parrot+suffix")
    assert [method["faults"] for method in proof["methods"].values()] == [0, 0]
    bench = run("bench", "--max-tokens", "8", "--repeats", "1", "--categories", "code", "--methods", "parrot")
    assert bench["replies"]
