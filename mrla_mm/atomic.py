"""Files that are written whole or not at all: beside the old one, forced to the disk, renamed."""

import os
from contextlib import suppress
from pathlib import Path

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
