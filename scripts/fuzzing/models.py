"""Fuzz model files: the checks before a load, plans, and loads that generate a token if they succeed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import edgespec
from edgespec.backends.llamacpp.header_validation import check_headers
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.model.formats.mlx_files import missing_files
from scripts.fuzzing.gguf_files import make_gguf
from scripts.fuzzing.mlx_files import make_mlx
from scripts.fuzzing.worker import Files


class Gguf:
    """The checks before a GGUF load: damaged counts, keys, values, tensor descriptions and data."""

    @staticmethod
    def make(rng: Random) -> Files:
        return {"model.gguf": make_gguf(rng)}

    @staticmethod
    def run(folder: Path) -> None:
        path = folder / "model.gguf"
        read_gguf_info(path)
        check_headers([path])


class GgufPlan(Gguf):
    """`edgespec.plan`, which first reads the file in a child process, in case that crashes."""

    @staticmethod
    def run(folder: Path) -> None:
        edgespec.plan(str(folder / "model.gguf"), None, threads=1)


class GgufLoad(Gguf):
    @staticmethod
    def run(folder: Path) -> None:
        path = str(folder / "model.gguf")
        with edgespec.load(path, None, context=256, threads=1, prefix_cache="none") as runtime:
            runtime.generate("Hello", max_tokens=1)


class Mlx:
    """The checks before an MLX load: damaged configurations, tokenizers, weight headers and indexes."""

    @staticmethod
    def make(rng: Random) -> Files:
        return {f"model/{name}": content for name, content in make_mlx(rng).items()}

    @staticmethod
    def run(folder: Path) -> None:
        missing_files(folder / "model")
        edgespec.plan(str(folder / "model"), None)


class MlxLoad(Mlx):
    @staticmethod
    def run(folder: Path) -> None:
        with edgespec.load(str(folder / "model"), None, context=256, prefix_cache="none") as runtime:
            runtime.generate("Hello", max_tokens=1)
