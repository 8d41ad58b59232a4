"""`edgespec completion`: print a shell completion script for commands, options and model names."""

from __future__ import annotations

import sys

import click

from edgespec.cli.help import HelpfulCommand

__all__ = ["command"]


@click.command(
    "completion",
    cls=HelpfulCommand,
    short_help="Print the completion script for your shell.",
    examples=("edgespec completion bash", "edgespec completion zsh", "edgespec completion fish"),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and model names in your shell.

    \b
    To install it, run one of these commands once, then open a new shell:
      bash   echo 'eval "$(edgespec completion bash)"' >> ~/.bashrc
      zsh    echo 'eval "$(edgespec completion zsh)"' >> ~/.zshrc
      fish   edgespec completion fish > ~/.config/fish/completions/edgespec.fish
    """
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(ctx.find_root().command, {}, "edgespec", "_EDGESPEC_COMPLETE").source()
    sys.stdout.write(script)
