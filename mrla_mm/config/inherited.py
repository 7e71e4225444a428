"""Arguments that are left over in a part of a config from its base config, where that part is of another class."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from mmengine.config import Config

UNKNOWN = re.compile(r"([\w.]+): (\w+) has no argument '(\w+)'")  # how a fault of an argument begins


def gather_left_over(cfg: Config, faults: Sequence[str]) -> list[str]:
    """Return the faults found in a config, those of arguments left over from another class as one, with the remedy.

    A config that gives a part another type is merged into the part of the base config, and an override into the file's.
    """
    if not os.path.isfile(getattr(cfg, "filename", None) or "") or not any(map(UNKNOWN.match, faults)):
        return list(faults)
    former, left, others = list(versions(cfg.filename)), {}, []
    for fault in faults:
        path, owner, key = UNKNOWN.match(fault).groups() if UNKNOWN.match(fault) else ("", "", "")
        path = path.removesuffix(f".{key}")
        if key and (kind := kind_with(former, path, key, part_at(cfg, path))):
            left.setdefault((path, owner, kind), []).append(key)
        else:
            others.append(fault)
    said = []
    for (path, owner, kind), keys in left.items():
        of_file = kind_with(former[:1], path, keys[0], part_at(cfg, path)) == kind
        remedy = f"add --cfg-options {path}._delete_=True" if of_file else f"write _delete_=True into {path}"
        if path.rpartition(".")[2].isdigit():  # mmengine always merges into a part of a list
            remedy = f"write {path.rpartition('.')[0]} anew in a config file"
        said.append(
            f"{path}: {owner} has no argument {', '.join(map(repr, keys))}, left over from the {kind} whose place it "
            f"takes; {remedy}, so that nothing of that one stays"
        )
    return said + others


def versions(filename: str) -> Iterator[Mapping]:
    """Yield a config file as it is without overrides, and the configs that it is based on, all the way down."""
    yield Config.fromfile(filename, import_custom_modules=False)
    for base in Config._get_base_files(filename):
        yield from versions(Config._get_cfg_path(base, filename)[0])


def kind_with(former: Sequence[Mapping], path: str, key: str, part: object) -> str | None:
    """Return the class that a part of another type has in the first of these configs to give it the key."""
    for version in former:
        old = part_at(version, path)
        if isinstance(old, Mapping) and key in old and "type" in old and old["type"] != part.get("type"):
            return getattr(old["type"], "__name__", str(old["type"]))
    return None


def part_at(cfg: object, path: str) -> object:
    """Return what is at a place of a config, None if nothing is."""
    for name in path.split("."):
        if isinstance(cfg, list | tuple) and name.isdigit() and int(name) < len(cfg):
            cfg = cfg[int(name)]
        else:
            cfg = cfg.get(name) if isinstance(cfg, Mapping | Config) else None
    return cfg
