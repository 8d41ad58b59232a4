"""Find which passes of models agree bit for bit on this machine, and print them as JSON.

    python -m scripts.gpu_checking.width_classes [--gpu-layers N] MODEL...

Each model is tried with the kernels that are most likely to agree, with and without repacked weights where
that makes a difference, and without flash attention. Nothing is assumed about which widths agree.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import edgespec
from edgespec.loading.bit_exactness import WidthClass, find_width_classes
from edgespec.model.base import LoadOptions
from edgespec.model.registry import backend_of, format_at

_CONTEXT_TOKENS = 2048


def find_classes(path: Path, gpu_layers: int | None) -> Iterator[dict[str, Any]]:
    """Yield the classes of a model, one object per set of load options."""
    form = format_at(path)
    backend = backend_of(form.name)
    exact = LoadOptions(context_tokens=_CONTEXT_TOKENS, gpu_layers=gpu_layers, exact=True)
    configurations = {"exact kernels": exact}
    if backend.repacks(path, exact):
        configurations["exact kernels, weights not repacked"] = replace(exact, repack=False)
    if "flash_attention" not in backend.ignored_options:
        configurations["no flash attention"] = replace(exact, flash_attention="off")
    for name, options in configurations.items():
        start = time.monotonic()
        model = form.load(str(path), path.name, options, None)
        try:
            classes = find_width_classes(model)
        finally:
            model.close()
        yield {
            "options": name,
            "classes": [_to_json(found) for found in classes],
            "seconds": round(time.monotonic() - start, 1),
        }


def _to_json(found: WidthClass) -> dict[str, Any]:
    return {
        "widths": found.text,
        "trees": found.trees,
        "block_tokens": found.block_tokens,
        "any_threads": found.any_threads,
        "complete": found.is_complete,
    }


def read_choice(path: Path, gpu_layers: int | None) -> str:
    """Return the load options that edgespec chooses for a model by default, as shown to users."""
    options: dict[str, Any] = {} if gpu_layers is None else {"gpu_layers": gpu_layers}
    if "gpu_layers" in backend_of(format_at(path).name).ignored_options:
        options = {}
    with edgespec.load(str(path), "none", method="suffix", context=_CONTEXT_TOKENS, **options) as runtime:
        exactness = runtime.target.exactness
        return exactness.reason if exactness else "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu-layers", type=int)
    parser.add_argument("models", nargs="+", type=Path)
    args = parser.parse_args()
    results = [
        {
            "model": path.name,
            "chosen": read_choice(path, args.gpu_layers),
            "configurations": list(find_classes(path, args.gpu_layers)),
        }
        for path in args.models
    ]
    print(json.dumps({"models": results}))


if __name__ == "__main__":
    main()
