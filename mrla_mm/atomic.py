"""Files that are written whole or not at all, and folders that one process writes at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mrla_mm.errors import InputError

PART = ".part"  # what a killed process may leave behind; no pattern for checkpoints matches it


def write_atomically(path: str | Path, content: bytes | memoryview) -> None:
    """Replace a file; where the disk refuses, raise InputError and leave the old one whole."""
    path = Path(path)
    part = path.with_name(path.name + PART)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):  # the part may not exist
            part.unlink()
        raise InputError(f"{path}: {error}; what was there is intact") from error


@contextmanager
def lock_folder(folder: str | Path, option: str) -> Iterator[None]:
    """Keep other processes out of the folder that an option names; InputError if one is in it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            lock(file)
        except (BlockingIOError, PermissionError):
            told = f"{option} {folder} is in use by another process"
            raise InputError(f"{told}: wait for its end, or give another folder") from None
        except OSError:  # a file system without locks
            pass
        yield


def lock(file: TextIO) -> None:
    """Lock a file until it is closed or the process ends, whatever its children do."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
