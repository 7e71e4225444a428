"""Files that appear whole or not at all: written aside, forced to the disk, renamed."""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from mmengine.fileio import LocalBackend, register_backend

from mrla_mm.errors import InputError

PART = ".part"  # what a killed process may leave behind; no pattern for checkpoints matches it
BACKEND = "mrla_mm_atomic"


def write_atomically(path: str | Path, content: bytes | memoryview) -> None:
    """Replace a file, at no moment leaving less than one whole file there.

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
        with contextlib.suppress(OSError):  # some network file systems open no folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise InputError(
            f"{path} cannot be written: {error.strerror or error} ({len(content) / 2**20:.1f} MiB). What was there is "
            "intact: make room and start again, a training with --resume"
        ) from error


class AtomicBackend(LocalBackend):
    """mmengine's local files, written atomically, and removed only when `prune` is called."""

    def __init__(self) -> None:
        self.outdated: list[str] = []

    def put(self, obj: bytes | memoryview, filepath: str | Path) -> None:
        """Write a file."""
        write_atomically(filepath, obj)

    def remove(self, filepath: str | Path) -> None:
        """Note a file for removal."""
        self.outdated.append(str(filepath))

    def prune(self, keep: Collection[str] = ()) -> None:
        """Remove what was noted, except files that have been written anew."""
        for path in set(self.outdated) - set(keep):
            Path(path).unlink(missing_ok=True)
        self.outdated.clear()


register_backend(BACKEND, AtomicBackend)
