"""Where tools write, checked before any work: minutes of it must not end at a wrong path, nor cost an input."""

import os
from collections.abc import Iterable
from pathlib import Path

from mrla_mm.errors import InputError


def make_folder(path: str | Path, option: str = "--out-dir") -> Path:
    """Make a folder to write into.

    Raises:
        InputError: it, or a part of its path, is a file, or it may not be written to.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise InputError(f"{option} {folder} cannot be made a folder ({reason}): give another one") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option} {folder} may not be written to: give another folder")
    return folder


def make_place(path: str | Path, option: str) -> Path:
    """Make the folder of a file to write.

    Raises:
        InputError: the path names a folder, or its folder cannot be made or written to.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder: give the name of a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"{option} {path} may not be written to: give another file")
    make_folder(path.parent, f"the folder of {option} {path},")
    return path


def spare_inputs(inputs: Iterable[Path], outputs: Iterable[Path]) -> None:
    """Raise InputError if a file to write is an input, under its own or another name, or lies in an input's folder."""
    inputs = list(inputs)
    folders = {path.parent.resolve() for path in inputs}
    for out in outputs:
        if out.parent.resolve() in folders:
            raise InputError(
                f"--out-dir {out.parent} holds the input, which the results could replace: give another folder"
            )
        if out.exists() and any(path.samefile(out) for path in inputs):
            raise InputError(f"--out-dir {out.parent}: {out.name} there is an input image; give another folder")
