"""Finding a config file by its path, or by `package::name` among those packed with a package."""

import difflib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from mrla_mm.errors import InputError

NEAR = 0.75  # likeness of two names, without their suffix, from which one may be meant for the other
OURS = "mrla_mm"


def locate_config(name: str) -> str:
    """Return the file of a config given by path, or by `package::name` among the configs packed with a package.

    Raises:
        InputError: there is no such file; names those that are near, or where this package's configs are.
    """
    package, separator, relative = name.partition("::")
    folder = packed_configs(package) if separator else None
    if separator and folder is None:
        raise InputError(f"config {name!r}: there is no installed package {package!r}")
    path = folder / relative if separator else Path(name)
    if path.is_file():
        if path.suffix not in (".py", ".json", ".yaml", ".yml"):
            raise InputError(f"config file {path} is no .py, .json or .yaml file")
        return str(path)
    searched = package if separator else OURS
    beside = [] if separator else [str(each) for each in near_to(path.stem, path.parent.glob("*.py"))]
    near = beside or near_packed(path.stem, searched)
    hint = f"did you mean {' or '.join(near)}?" if near else whereabouts(searched)
    raise InputError(f"config file {path} does not exist; {hint}")


def packed_configs(package: str) -> Path | None:
    """Return the folder of the configs packed with a package, None if there is no such package."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # of a name with dots
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / ".mim/configs"


def near_to(stem: str, paths: Iterable[Path]) -> list[Path]:
    """Return the file of this name, or at most three whose names are near, the nearest first."""
    by_stem = {path.stem: path for path in sorted(paths)}
    if stem in by_stem:
        return [by_stem[stem]]
    return [by_stem[each] for each in difflib.get_close_matches(stem, by_stem, n=3, cutoff=NEAR)]


def near_packed(stem: str, package: str) -> list[str]:
    """Return at most three configs of a package whose names are near, as `package::name`."""
    folder = packed_configs(package)
    found = near_to(stem, (path for path in folder.rglob("*.py") if "_base_" not in path.parts)) if folder else []
    return [f"{package}::{path.relative_to(folder).as_posix()}" for path in found]


def whereabouts(package: str) -> str:
    """Return where the configs of a package are, and how one is named."""
    folder = packed_configs(package)
    return f"the configs of {package} are in {folder}: give the path of a .py file, or {package}::NAME.py for one there"
