"""Reading a config file: what is wrong in it is named with its file and line."""

import importlib.util
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from mmengine.config import Config

from mrla_mm.config.locating import near_to
from mrla_mm.errors import InputError

READERS = ("_file2dict", "_parse_lazy_import", "_is_lazy_import")  # mmengine's functions that read one file each


def read_file(path: str | os.PathLike) -> Config:
    """Read a config file and the files it inherits from.

    Raises:
        InputError: one of the files cannot be read or run, is missing or belongs to a package that is not installed;
            or a module of `custom_imports` does not exist. Names file and line. An error inside such a module keeps
            its traceback.
    """
    try:
        return Config.fromfile(path)
    except InputError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        files = [frame.f_locals["filename"] for frame in frames if frame.f_code.co_name in READERS]
        if failed := failed_import(error):
            raise InputError(f"config file {path}: custom_imports: {failed}") from error
        if not files:
            raise
        where, line = place_of(error, [str(name) for name in files], frames)
        at = f"config file {os.path.normpath(where)}" + (f", line {line}" if line else "")
        raise InputError(f"{at}: {reason_of(error, str(files[-1]))}") from error


def place_of(error: Exception, files: list[str], frames: list) -> tuple[str, int | None]:
    """Return the file that an error is about and its line, None where no line is known."""
    if (syntax := next((e for e in chain(error) if isinstance(e, SyntaxError)), None)) and syntax.lineno:
        return files[-1], syntax.lineno
    ran = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename in files
    ]
    if ran:
        return ran[-1]
    if (line := getattr(error, "lineno", None)) or (mark := getattr(error, "problem_mark", None)):
        return files[-1], line or mark.line + 1
    existing = [name for name in files if os.path.isfile(name)]
    if existing == files and "_get_cfg_path" not in [frame.f_code.co_name for frame in frames]:
        return files[-1], None
    bases = [frame.f_locals.get("base_cfg_path") for frame in frames if frame.f_code.co_name == "_file2dict"]
    named = next(base for base in reversed(bases) if isinstance(base, str))
    return existing[-1], line_with(existing[-1], os.path.basename(named))


def line_with(path: str, text: str) -> int | None:
    """Return the number of the first line of a file that holds a text."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return next((number for number, line in enumerate(file, start=1) if text in line), None)


def reason_of(error: Exception, last: str) -> str:
    """Return in one line what is wrong; `last` is the file that was being read."""
    if isinstance(error, FileNotFoundError) and not os.path.isfile(last):
        path = Path(os.path.normpath(last))
        near = [str(each) for each in near_to(path.stem, path.parent.glob("*.py"))]
        return f"its _base_ {path} does not exist" + (f"; did you mean {' or '.join(near)}?" if near else "")
    if isinstance(error, ModuleNotFoundError) and str(error).endswith("manually"):
        package = str(error).split()[0]
        return f"a _base_ is of the package {package}, which is not installed: pip install {package}"
    syntax = next((e for e in chain(error) if isinstance(e, SyntaxError) and e.lineno), None)
    said = " ".join((syntax.msg if syntax else str(error)).split())
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def failed_import(error: Exception) -> str | None:
    """Return why a module of `custom_imports` cannot be imported, None for any other error."""
    if not str(error).startswith("Failed to import custom modules"):
        return None
    cause = [each for each in chain(error) if not str(each).startswith("Failed to import")]
    reason = cause[-1] if cause else error
    name = getattr(reason, "name", None)
    hint = "" if name and importlib.util.find_spec(name.split(".")[0]) else f"; put the folder of {name} on PYTHONPATH"
    return f"{type(reason).__name__}: {reason}{hint}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
