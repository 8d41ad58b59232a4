"""Compare replies drafted with heads of every kind with plain decoding, and print a table.

    .venv/bin/python -m scripts.proving.heads --folder build/heads

The demo models answer the evaluation prompts with their EAGLE head and with random heads for other methods.
Random heads are almost always wrong, so nearly every draft is rejected. The demo models have no layers for
multi-token prediction, so `mtp` drafts for tiny random models that do. Each head drafts chains and trees.
The exit status is 1 if there are faults, or if a head drafted nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import edgespec
from edgespec.api.loading import always_draft
from edgespec.losslessness.cases import read_prompts
from edgespec.losslessness.verify import verify
from edgespec.options.methods import head_names

_TEMPERATURES = (0.0, 0.8, 1.2)
_BRANCHES: dict[str, tuple[int, ...]] = {"chains": (), "trees": (3, 2)}
_HEADER = ("backend", "method", "drafts", "identical", "rounding", "faults", "drafted", "accepted")


@dataclass(frozen=True)
class Case:
    """A target and a head for it, which is part of the target's files if `head` is `auto`."""

    backend: str
    method: str
    target: str
    head: str
    has_trees: bool = True


def main() -> int:
    """Verify all heads and print the table. Return 1 for a fault or a head without drafts."""
    parser = argparse.ArgumentParser(
        prog="scripts.proving.heads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder for the random heads")
    parser.add_argument("--methods", default="", help="only these methods, separated by commas")
    parser.add_argument("--tokens", type=int, default=48, help="maximum tokens per reply (default: 48)")
    args = parser.parse_args()
    folder = args.folder.absolute()
    os.environ["EDGESPEC_DATA_DIR"] = str(folder / "data")
    os.environ["EDGESPEC_CACHE_DIR"] = str(folder / "cache")
    is_proved = True
    _print_row(*_HEADER)
    _print_row(*["---"] * len(_HEADER))
    chosen = args.methods.split(",") if args.methods else head_names()
    for case in _cases(folder):
        if case.method not in chosen:
            continue
        for drafts, branches in _BRANCHES.items():
            if branches and not case.has_trees:
                continue
            is_proved &= _is_proved(case, drafts, branches, args.tokens)
    return 0 if is_proved else 1


def _cases(folder: Path) -> Iterator[Case]:
    """Write the random heads and yield all cases."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.backends.mlx.mtp_layers import write_mtp_layer
    from tests.backends.mlx.tiny_checkpoints import write_checkpoint
    from tests.backends.tiny_mtp_models import write_mtp_model
    from tests.model.heads.published_dflash import write_dflash_head
    from tests.model.heads.residual_files import RESIDUAL_METHODS, Layout, random_arrays, write_heads

    size, vocab = 256, 8192  # Of both demo models.
    write_dflash_head(folder / "dflash", size=size, vocab=vocab, states=(1, 6, 10))
    for method in RESIDUAL_METHODS:
        layout = Layout(method, grounded=method == "hydra")
        write_heads(folder / method, layout, random_arrays(layout, size, vocab))
    for backend, target, eagle in (("llama.cpp", "demo", "demo-head"), ("MLX", "demo-mlx", "demo-mlx-head")):
        yield Case(backend, "eagle", target, eagle)
        for method in ("dflash", *RESIDUAL_METHODS):
            yield Case(backend, method, target, str(folder / method))
    dense = write_mtp_model(folder / "glm4moe.gguf", "glm4moe")
    yield Case("llama.cpp", "mtp", str(dense), "auto")
    recurrent = write_mtp_model(folder / "qwen35.gguf", "qwen35")
    yield Case("llama.cpp, recurrent", "mtp", str(recurrent), "auto", has_trees=False)
    original = write_mtp_layer(write_checkpoint(folder / "qwen3_next", "qwen3_next"))
    yield Case("MLX, recurrent", "mtp", str(original), "auto", has_trees=False)


def _is_proved(case: Case, drafts: str, branches: tuple[int, ...], tokens: int) -> bool:
    with (
        always_draft(),
        edgespec.load(
            case.target, "none", head=case.head, methods=(case.method,), draft_branches=branches
        ) as runtime,
    ):
        # The tiny models have a small vocabulary, so some prompts do not fit their context of 512 tokens.
        prompts = [
            prompt
            for prompt in read_prompts()
            if runtime.count_tokens(prompt.messages) + tokens <= runtime.context_tokens
        ]
        report = verify(
            runtime,
            prompts,
            methods=(case.method,),
            temperatures=_TEMPERATURES,
            draft_lengths=(4,),
            max_tokens=tokens,
        )
    found = report.methods[case.method]
    _print_row(
        case.backend,
        f"`{case.method}`",
        drafts,
        f"{found.identical} of {found.prompts}",
        str(found.rounding),
        str(found.faults),
        f"{found.drafted_tokens:,}",
        f"{found.accepted_tokens:,}",
    )
    return not (report.faults or report.nothing_drafted)


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
