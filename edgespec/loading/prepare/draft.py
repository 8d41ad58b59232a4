"""Convert draft models, such as those that `edgespec train draft` writes, to GGUF."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgespec.errors import OptionError
from edgespec.loading.prepare.gguf_parts import GgufParts
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.registry import format_at
from edgespec.store.prepared_builder import require_folder, write_conversion


def prepare_draft(folder: Path, target: Path, output: Path) -> int:
    """Convert a draft model to a GGUF file.

    Args:
        folder: Folder of the draft model, in MLX or Hugging Face format.
        target: The GGUF model to draft for. Its tokenizer is copied into the new file.
        output: The file to write. An existing file is replaced once the new one is complete.

    Returns:
        The size of the new file in bytes.

    Raises:
        ModelNotFoundError: The folder does not exist.
        OptionError: The target is not a GGUF model, or the vocabularies differ.
        ModelFileError: The draft model is damaged, or its architecture cannot be converted.
        EdgespecError: The file cannot be written.
    """
    from edgespec.backends.llamacpp.gguf_conversion import convert_draft_model

    form = format_at(target)
    if not form.converted_heads:
        raise OptionError(
            f"{target} is not a GGUF model",
            "pass the GGUF model that the draft model was trained for",
            code="wrong_file",
        )
    require_folder(folder)
    own, other = format_at(folder).read_tokens(folder), form.read_tokens(target)
    if own is None or other is None or not own.same_ids(other):
        raise OptionError(
            f"the draft model {folder} and {target} have different vocabularies",
            "pass the GGUF model that the draft model was trained for",
            code="vocabulary_mismatch",
        )
    model = GgufParts(gguf_files(target))
    metadata = model.metadata(0, model.layer_count)
    tokenizer = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    convert = partial(convert_draft_model, folder, tokenizer)
    return write_conversion(output, f"the draft model {folder}", convert)
