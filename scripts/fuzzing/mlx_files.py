"""Make MLX model folders from the embedded MLX draft model, with random changes to one or a few files."""

from __future__ import annotations

import json
import struct
from functools import cache
from random import Random

from edgespec.store.catalogue import models_folder
from scripts.fuzzing.mutations import NASTY_INTEGERS, damage, damage_json, nested_json, several

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_LENGTH = struct.Struct("<Q")


@cache
def _model() -> dict[str, bytes]:
    folder = models_folder() / "demo-mlx-draft"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def make_mlx(rng: Random) -> dict[str, bytes]:
    """Return the files of a model with random changes."""
    files = dict(_model())
    header, data = _header_and_data(files[_WEIGHTS])
    if rng.random() < 0.3:
        names = [name for name in header if name != "__metadata__"]
        files[_INDEX] = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, _WEIGHTS)}).encode()
    for _ in range(rng.choice((1, 1, 1, 2))):
        # Change the configuration and the weight header most often, because most checks read them.
        name = rng.choice(("config.json", "config.json", _WEIGHTS, _WEIGHTS, *sorted(files)))
        kind = rng.randrange(12)
        if kind == 0:
            files.pop(name, None)
        elif kind == 1:
            files[name] = several(
                rng, files.get(name, b" "), lambda rng, text: damage(rng, text, (0, min(len(text), 4000)))
            )
        elif name == _WEIGHTS:
            files[name] = _changed_weights(rng, several(rng, header, damage_json), data)
        elif name.endswith(".json") and name in files:
            files[name] = _changed_json(rng, files[name])
    return files


def _header_and_data(weights: bytes) -> tuple[dict[str, object], bytes]:
    end = _LENGTH.size + _LENGTH.unpack_from(weights)[0]
    return json.loads(weights[_LENGTH.size : end]), weights[end:]


def _changed_weights(rng: Random, header: object, data: bytes) -> bytes:
    encoded = nested_json(rng, header)
    length = len(encoded) if rng.random() < 0.9 else rng.choice(NASTY_INTEGERS) % 2**64
    return _LENGTH.pack(length) + encoded + (data if rng.random() < 0.9 else data[: rng.randrange(len(data))])


def _changed_json(rng: Random, text: bytes) -> bytes:
    try:
        return nested_json(rng, several(rng, json.loads(text), damage_json))
    except (ValueError, RecursionError):
        return damage(rng, text)  # The JSON is invalid after an earlier change.
