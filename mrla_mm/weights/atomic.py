"""Files that appear whole or not at all: written aside, forced to the disk, renamed."""

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

from mrla_mm.errors import InputError

PART = ".part"  # what a killed process may leave behind; no pattern for checkpoints matches it
BACKEND = "mrla_mm_atomic"
MEBIBYTE = 1 << 20


def write_atomically(path: str | Path, content: bytes | memoryview) -> None:
    """Put a file in place of whatever the path holds, at no moment leaving less than one whole file there.

    Raises:
        InputError: the disk is full or refuses; what the path held before is untouched.
    """
    path = Path(path)
    part = path.with_name(path.name + PART)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise InputError(not_written(path, len(content), error)) from error


def sync_folder(folder: Path) -> None:
    """Force a folder's list of names to the disk, where the system can."""
    with contextlib.suppress(OSError):  # Windows and some network file systems open no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def not_written(path: Path, size: int, error: OSError) -> str:
    """Return the message for a file that could not be written."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(path.parent).free / MEBIBYTE:.1f} MiB are free"
    return (
        f"{path} cannot be written: {error.strerror or error} ({size / MEBIBYTE:.1f} MiB to write{free}). "
        "What was there is intact: make room, or mend what the message says, and start again; a training with --resume"
    )


class AtomicBackend(LocalBackend):
    """mmengine's local files, each written with `write_atomically`."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write bytes to a file."""
        write_atomically(filepath, obj)


class PostponedRemoval:
    """A file backend that removes nothing until it is told to, by `prune`."""

    def __init__(self, backend):
        self.backend = backend
        self.outdated: list[str] = []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def remove(self, filepath: str | Path) -> None:
        """Note a file, or a folder, for removal."""
        self.outdated.append(str(filepath))

    rmtree = remove

    def prune(self, *, kept: Collection[str] = ()) -> None:
        """Remove what was noted, as far as it is there and was not written anew."""
        for path in set(self.outdated) - set(kept):
            if self.backend.isfile(path):
                self.backend.remove(path)
            elif self.backend.isdir(path):  # checkpoints saved by DeepSpeed are folders
                self.backend.rmtree(path)
        self.outdated.clear()


register_backend(BACKEND, AtomicBackend)
