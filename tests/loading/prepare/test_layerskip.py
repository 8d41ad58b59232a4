"""Split models are verified, resumed after interruptions, and never incomplete."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.errors import CancelledError, CapabilityError, ModelFileError, ModelNotFoundError, OptionError
from edgespec.loading.prepare.gguf_parts import GgufParts, split_metadata, write_gguf
from edgespec.loading.prepare.layerskip import measure_exits, prepare_layerskip
from edgespec.model.base import LoadOptions
from edgespec.model.formats.layerskip_files import LOWER, LOWER_FIRST, SHARED, UPPER, UPPER_FIRST
from edgespec.store.prepared_files import check_prepared, find_prepared, store_folder
from edgespec.store.reference import resolve
from tests.backends.tiny_models import write_gemma2, write_gemma3, write_jamba, write_llama, write_mamba
from tests.raising import raises

FILES = {SHARED, LOWER, UPPER, LOWER_FIRST, UPPER_FIRST}


@pytest.fixture
def three_layers(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf", layers=3)


@pytest.fixture
def demo(tmp_path: Path, demo_target: Path) -> Path:
    return Path(shutil.copy(demo_target, tmp_path / "demo.gguf"))


def _nothing_there() -> bool:
    return not [path for path in store_folder().rglob("*") if path.is_file() and path.suffix != ".lock"]


class TestParts:
    @pytest.mark.long
    def test_every_tensor_is_stored_once(self, three_layers: Path) -> None:
        prepared = prepare_layerskip(three_layers, 2)
        assert {file.name for file in prepared.files} == FILES
        source = {tensor.name: tensor.data for tensor in gguf.GGUFReader(three_layers).tensors}
        found = {}
        for name, begin in ((SHARED, 0), (LOWER, 0), (UPPER, 2)):
            for tensor in gguf.GGUFReader(prepared.path(name)).tensors:
                first, layer, *rest = tensor.name.split(".")
                original = (
                    ".".join([first, str(int(layer) + begin), *rest]) if first == "blk" else tensor.name
                )
                assert original not in found
                found[original] = np.array(tensor.data)
        assert found.keys() == source.keys()
        for name, data in source.items():
            np.testing.assert_array_equal(found[name], data)

    @pytest.mark.long
    def test_a_multi_part_model_is_prepared(self, tmp_path: Path, demo_target: Path) -> None:
        source = GgufParts([demo_target])
        names = [tmp_path / f"demo-0000{i}-of-00002.gguf" for i in (1, 2)]
        _split(demo_target, names)
        prepared = prepare_layerskip(names[0], 4)
        assert len(prepared.source_records) == 2
        assert prepared.facts["layer_count"] == source.layer_count
        names[1].write_bytes(names[1].read_bytes()[:-1])
        with raises(ModelFileError, "since", code="prepared_outdated"):
            check_prepared(prepared, names[0])

    def test_per_layer_arrays_are_split(self, tmp_path: Path) -> None:
        path = tmp_path / "arrays.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(4)
        writer.add_head_count_kv([1, 2, 3, 4])
        writer.add_leading_dense_block_count(3)
        writer.add_array("llama.rope.dimension_sections", [9, 8, 7, 6])
        writer.add_array("tokenizer.ggml.scores", [1.0, 2.0, 3.0, 4.0])
        writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source = GgufParts([path])
        lower, upper = source.metadata(0, 1), source.metadata(1, 4)
        for part, heads, dense, count in ((lower, [1], 1, 1), (upper, [2, 3, 4], 2, 3)):
            assert part["llama.attention.head_count_kv"][0] == heads
            assert part["llama.leading_dense_block_count"][0] == dense
            assert part["llama.block_count"][0] == count
            assert part["llama.rope.dimension_sections"][0] == [9, 8, 7, 6]
            assert len(part["tokenizer.ggml.scores"][0]) == 4
        for exit_layer in (1, 2, 3):
            halves = []
            for name, begin, end in (("lower", 0, exit_layer), ("upper", exit_layer, 4)):
                write_gguf(
                    tmp_path / name, "llama", source.metadata(begin, end) | split_metadata(0, 1, 0), {}
                )
                halves.append(GgufParts([tmp_path / name]))
            whole = halves[0].metadata_with(halves[1])
            assert whole == source.metadata(0, 4)


class TestErrors:
    @pytest.mark.parametrize("exit_layer", [0, 3, -1, 99])
    def test_an_exit_layer_out_of_range(self, three_layers: Path, exit_layer: int) -> None:
        with raises(OptionError, "to 2"):
            prepare_layerskip(three_layers, exit_layer)
        assert _nothing_there()

    @pytest.mark.parametrize("write", [write_mamba, write_jamba, write_llama], ids=["mamba", "jamba", "one"])
    def test_models_that_cannot_be_split(self, tmp_path: Path, write: Callable[[Path], Path]) -> None:
        with raises(CapabilityError, "be prepared", code="early_exit_not_supported"):
            prepare_layerskip(write(tmp_path / "model.gguf"), 1)
        assert _nothing_there()

    @pytest.mark.parametrize(("write", "exit_layer"), [(write_gemma2, 1), (write_gemma3, 2)])
    def test_split_models_with_other_logits(
        self, tmp_path: Path, write: Callable[[Path], Path], exit_layer: int
    ) -> None:
        """Gemma 2 scales its embeddings, and the layers of Gemma 3 depend on their index."""
        with raises(CapabilityError, "change the output", code="early_exit_not_supported"):
            prepare_layerskip(write(tmp_path / "model.gguf"), exit_layer)
        assert _nothing_there()

    def test_a_model_that_was_not_trained_for_early_exit(self, three_layers: Path) -> None:
        with raises(CapabilityError, "faster", code="early_exit_not_supported"):
            prepare_layerskip(three_layers)
        assert _nothing_there()

    @pytest.mark.long
    def test_a_damaged_model(self, demo: Path) -> None:
        demo.write_bytes(demo.read_bytes()[:1_000_000])
        with raises(ModelFileError, "damaged"):
            prepare_layerskip(demo, 4)

    @pytest.mark.long
    def test_a_full_disk(self, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 2**20))
        with raises(ModelFileError, "1.0 MiB", code="disk_full"):
            prepare_layerskip(demo, 4)
        assert _nothing_there()


class TestInterruptions:
    @pytest.mark.long
    def test_resumes_after_cancellation(self, demo: Path) -> None:
        calls = 0

        def until(limit: int) -> Callable[[str, float], bool]:
            def progress(what: str, fraction: float) -> bool:
                nonlocal calls
                calls += 1
                return calls < limit

            return progress

        prepare_layerskip(demo, 4, to=demo.parent / "whole", progress=until(1 << 30))
        needed, written = calls, set[str]()
        for limit in range(1, needed, max(1, needed // 4)):
            calls = 0
            try:
                prepare_layerskip(demo, 4, progress=until(limit))
            except CancelledError:
                assert not list(store_folder().rglob("edgespec.json"))
                written |= {path.name for path in store_folder().rglob("*.gguf")}
        prepared = prepare_layerskip(demo, 4)
        check_prepared(prepared, demo, full=True)
        assert written

    def test_resumes_after_being_killed(self, demo: Path) -> None:
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from edgespec.loading.prepare.layerskip import prepare_layerskip\n"
            "prepare_layerskip(Path(sys.argv[1]), 4)\n"
        )
        for pause in (0.05, 0.4):
            process = subprocess.Popen([sys.executable, "-c", program, str(demo)], env=dict(os.environ))
            deadline = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < deadline:
                if list(store_folder().rglob("journal.json")):
                    break
                time.sleep(0.01)
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
            process.wait()
            there = find_prepared("layerskip", demo)
            if there is not None:
                check_prepared(there, demo, full=True)
        prepared = prepare_layerskip(demo, 4)
        check_prepared(prepared, demo, full=True)
        assert not list(store_folder().rglob("*.partial"))


# Each part and each kind of damage. All files are checked in the same way, so `-m long` tests the other
# pairs.
DAMAGES = {
    (LOWER, "cut"),
    (LOWER_FIRST, "changed"),
    (SHARED, "gone"),
    (UPPER, "changed"),
    (UPPER_FIRST, "cut"),
}


class TestPreparedModels:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            pytest.param(*pair, marks=[] if pair in DAMAGES else pytest.mark.long)
            for pair in product(sorted(FILES), ("cut", "changed", "gone"))
        ],
    )
    def test_the_error_names_the_damaged_part(self, three_layers: Path, name: str, damage: str) -> None:
        prepared = prepare_layerskip(three_layers, 1)
        path = prepared.path(name)
        data = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(data[:-1] if damage == "cut" else data[:50] + b"\xff" + data[51:])
        with raises(ModelFileError, name, code="prepared_outdated"):
            resolve(str(prepared.folder))
        check_prepared(prepare_layerskip(three_layers, 1), three_layers, full=True)

    @pytest.mark.long
    def test_the_folder_can_be_loaded(self, three_layers: Path, tmp_path: Path) -> None:
        prepared = prepare_layerskip(three_layers, 1, to=tmp_path / "halves")
        found = resolve(str(tmp_path / "halves"))
        assert (found.format, found.path, found.name) == ("layerskip", prepared.folder, "model.gguf")
        assert resolve(str(three_layers)).format == "gguf"

    @pytest.mark.long
    def test_the_split_model_works_without_its_source(self, three_layers: Path) -> None:
        prepared = prepare_layerskip(three_layers, 1)
        three_layers.unlink()
        found = resolve(str(three_layers))
        assert (found.format, found.path) == ("layerskip", prepared.folder)
        assert "was deleted" in found.note
        model = load_layerskip(str(found.path), found.name, LoadOptions(context_tokens=256))
        assert model.exit_layer == 1
        model.close()
        shutil.rmtree(prepared.folder)
        with pytest.raises(ModelNotFoundError):
            resolve(str(three_layers))

    @pytest.mark.long
    def test_a_changed_source_is_prepared_again(self, three_layers: Path) -> None:
        first = prepare_layerskip(three_layers, 1)
        write_llama(three_layers, layers=3, seed=1)
        with raises(ModelFileError, "since", code="prepared_outdated"):
            check_prepared(first, three_layers)
        second = prepare_layerskip(three_layers, 1)
        check_prepared(second, three_layers, full=True)
        assert second.files != first.files


@pytest.mark.long
def test_exits_of_a_trained_model_agree(demo_target: Path) -> None:
    table = measure_exits(demo_target, GgufParts([demo_target]))
    exits = table.exits
    assert table.layer_count == 12
    costs = [found.cost for found in exits]
    assert 0.0 < costs[0] < costs[-1] < 1.0
    assert [found.exit_layer for found in exits] == list(range(1, 12))
    agreements = [found.agreement for found in exits]
    assert agreements[3] > 0.7
    assert agreements[-1] > agreements[0]
    assert all(found.speed_up > 0 for found in exits)


def _split(path: Path, parts: list[Path]) -> None:
    """Write a model in several parts, as the split tool of llama.cpp does."""
    source = GgufParts([path])
    count, metadata = len(parts), source.metadata(0, source.layer_count)
    first = metadata | split_metadata(0, count, len(source.tensors))
    write_gguf(parts[0], source.architecture, first, {})
    write_gguf(parts[1], source.architecture, split_metadata(1, count, 0), source.tensors)
