"""Fake stores in the layouts of Ollama, LM Studio and the Hugging Face cache, filled by tests."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

REGISTRY = "registry.ollama.ai"


def snapshot_of(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return the size, time and content of every file and link below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns, content)
    return found


class OllamaStore:
    """A store in Ollama's layout: manifests, and blobs named by SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, content: bytes) -> str:
        """Store bytes as a blob and return their digest."""
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs" / f"sha256-{digest}").write_bytes(content)
        return f"sha256:{digest}"

    def add(self, name: str, tag: str, content: bytes, *others: tuple[str, bytes]) -> Path:
        """Add a model as registry/owner/name, owner/name or name, and return its blob."""
        parts = name.split("/")
        place = {1: [REGISTRY, "library", *parts], 2: [REGISTRY, *parts]}.get(len(parts), parts)
        digest = self.blob(content)
        layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}]
        for kind, data in (("template", b"{{ .Prompt }}"), *others):
            layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": self.blob(data)})
        manifest = self.folder.joinpath("manifests", *place, tag)
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return self.folder / "blobs" / digest.replace(":", "-")


def add_to_lmstudio(root: Path, name: str, source: Path) -> Path:
    """Add a file or a folder to LM Studio as publisher/repository[/file]."""
    target = root / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return target


def add_to_hub(cache: Path, repository: str, *sources: Path, commit: str = "1" * 40) -> Path:
    """Add files to a snapshot of the Hugging Face cache, and return the snapshot."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for source in sources:
        blob = folder / "blobs" / hashlib.sha256(source.read_bytes()).hexdigest()
        shutil.copyfile(source, blob)
        (snapshot / source.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
