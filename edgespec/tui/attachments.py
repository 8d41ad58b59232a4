"""Read the files that a message refers to, and count their tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from edgespec.attachments.finding import NoSuchFileError, find_files
from edgespec.attachments.reading import ReadFiles, read_files
from edgespec.errors import AttachmentError, CapabilityError
from edgespec.system.files import error_reason, file_state
from edgespec.tui.input_syntax import find_references, without_punctuation

if TYPE_CHECKING:
    from edgespec import AttachedFile, Message
    from edgespec.api.sharing.base import ChatModel
    from edgespec.model.image import Image


@dataclass(frozen=True, slots=True)
class Attachment:
    """The files named by a reference in a message: a single file, a folder, or all matches of a pattern.

    Attributes:
        path: The path of the reference.
        files: The files, with their sizes in tokens. Empty if they cannot be attached.
        skipped: Number of files in the folder that contain no text.
        problem: Why the files cannot be attached, or None if they can.
    """

    path: str
    files: tuple[AttachedFile, ...] = ()
    skipped: int = 0
    problem: AttachmentError | None = None

    @property
    def token_count(self) -> int:
        return sum(file.token_count for file in self.files)


class AttachmentReader:
    """Reads attachments, and caches the latest ones until their files change. Not thread-safe."""

    def __init__(self, runtime: ChatModel) -> None:
        self._runtime = runtime
        self._known: dict[str, tuple[object, Attachment]] = {}

    def read(self, references: Sequence[str]) -> tuple[Attachment, ...]:
        """Return the attachments of a message. References to files that have never existed are skipped.

        An attachment gets a `problem` if it does not fit in the context after the preceding ones, or if its
        files have been deleted since the last call.
        """
        known, attachments, token_count = {}, [], 0
        for reference in references:
            path = next(filter(_exists, (reference, without_punctuation(reference))), None)
            if path is None:
                if reference in self._known or without_punctuation(reference) in self._known:
                    attachments.append(Attachment(reference, problem=_deleted(reference)))
                continue
            state = _state(path)
            before = self._known.get(path)
            attachment = before[1] if before and before[0] == state else self._read(path)
            known[path] = (state, attachment)
            token_count += attachment.token_count
            if token_count > self._runtime.context_tokens:
                attachment = Attachment(
                    path, problem=self._too_large(f"the attached files have {token_count:,} tokens")
                )
            attachments.append(attachment)
        self._known = known
        return tuple(attachments)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in `text`."""
        return len(self._runtime.vocabulary.tokenize(text, special=False, start=False))

    def _read(self, path: str) -> Attachment:
        try:
            read = read_files(path)
            return Attachment(path, self._counted(path, read), read.skipped)
        except AttachmentError as error:
            return Attachment(path, problem=error)

    def _counted(self, path: str, read: ReadFiles) -> tuple[AttachedFile, ...]:
        """Return the files with their sizes in tokens. Raises AttachmentError if they exceed the context."""
        vocabulary, limit_tokens = self._runtime.vocabulary, self._runtime.context_tokens
        # Reject files that are certainly too large before tokenizing them, which can take minutes.
        least = sum(vocabulary.min_tokens(file.text) for file in read.files)
        if least > limit_tokens:
            raise self._too_large(f"{path} has at least {least:,} tokens")
        counts = [
            self._image_tokens(path, file.image) if file.image else self.count_tokens(file.block)
            for file in read.files
        ]
        if sum(counts) > limit_tokens:
            raise self._too_large(f"{path} has {sum(counts):,} tokens")
        return tuple(
            replace(file, token_count=number) for file, number in zip(read.files, counts, strict=True)
        )

    def _image_tokens(self, path: str, image: Image) -> int:
        try:
            return self._runtime.image_tokens(image)
        except CapabilityError as error:
            raise AttachmentError(
                f"{path} is an image, but {error.what}", error.next_step, code=error.code
            ) from error

    def _too_large(self, size: str) -> AttachmentError:
        return AttachmentError(
            f"{size}, but the context holds only {self._runtime.context_tokens:,}",
            "attach less, or choose a larger --context",
            code="attachment_too_large",
        )


def saved_files(
    message: Message, references: Sequence[str]
) -> tuple[tuple[AttachedFile, ...], Sequence[str]]:
    """Return the files of a saved message that references in its new text still name.

    The files are not read again, because the message may have been written in another folder.

    Args:
        message: The message.
        references: The references in its new text.

    Returns:
        The files, and the references whose files must be read because the message did not have them.
    """
    before = {without_punctuation(each) for each in find_references(message.content)}
    names = {without_punctuation(each) for each in references}
    added = [each for each in references if without_punctuation(each) not in before]
    if before <= names:
        return message.files, added

    def is_named(file: AttachedFile, reference: str) -> bool:
        name = os.path.normpath(without_punctuation(reference))
        return file.name == name or file.name.startswith(f"{name}/") or fnmatch(file.name, name)

    old = [each for each in references if each not in added]
    files = tuple(file for file in message.files if any(is_named(file, each) for each in old))
    # A dropped file has a shorter name than its reference. Read it again rather than leaving it out.
    unknown = [each for each in old if not any(is_named(file, each) for file in files)]
    return files, [each for each in references if each in added or each in unknown]


def _deleted(reference: str) -> AttachmentError:
    return AttachmentError(
        f"{reference} no longer exists",
        "choose another file, or press Enter again to send the message without it",
        code="attachment_not_found",
    )


def _exists(path: str) -> bool:
    if os.path.lexists(os.path.expanduser(path)):
        return True
    # Text such as `@cache[str]` is code, not a pattern, so do not search for matching files.
    if "*" not in path:
        return False
    try:
        find_files(path)
    except NoSuchFileError:
        return False
    except AttachmentError:
        pass  # `read` reports it.
    return True


def _state(path: str) -> object:
    """Return a value that changes whenever the files at `path` change."""
    try:
        return [(str(each), file_state(each)) for each in find_files(path)]
    except (AttachmentError, OSError) as error:
        return error_reason(error)
