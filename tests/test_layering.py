"""The design's layers: imports point down only, and the equations need torch alone."""

import ast
import re
import sys

import pytest

from .conftest import ROOT

PACKAGE = ROOT / "mrla_mm"
ANYONE = {"atomic", "errors", "registry", "torch_support", "version"}
ALLOWED = {
    **dict.fromkeys((*ANYONE, "compat", "necks", "weights", "datasets", "engine"), set()),
    "functional": set(),
    "attention": {"functional"},
    "backbones": {"attention", "weights"},
    "comparators": {"attention", "backbones", "functional", "weights"},
}
FOLDERS = set(ALLOWED) - ANYONE
ALLOWED |= {
    "__init__": FOLDERS,
    "config": FOLDERS,
    "export": FOLDERS,
    "inference": FOLDERS | {"config"},
    "typos": set(),
    "cli": FOLDERS | {"config", "inference", "typos"},
    "training": FOLDERS,
    "analysis": FOLDERS | {"cli", "config", "inference", "training"},
    "__main__": {"cli"},
}
FILES = {path.stem for path in PACKAGE.glob("*.py")}
PARTS = sorted(FILES | {path.parent.name for path in PACKAGE.glob("*/__init__.py")})


def names_in(path):
    """Dotted names that a file imports anywhere, and modules of ours named in its strings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"mrla_mm(\.\w+)+", str(node.value)):
            yield node.value


def files_of(part):
    folder = PACKAGE / part
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]


@pytest.mark.parametrize("part", PARTS)
def test_parts_import_only_what_lies_below_them(part):
    assert part in ALLOWED, f"mrla_mm/{part} has no place in the layers"
    for path in files_of(part):
        ours = {name.split(".")[1] for name in names_in(path) if name.startswith("mrla_mm.")}
        forbidden = (ours & set(PARTS)) - ALLOWED[part] - ANYONE - {part}
        assert not forbidden, f"{path.relative_to(PACKAGE)} imports {sorted(forbidden)}"


def test_the_equations_import_torch_alone():
    foreign = {name.split(".")[0] for name in names_in(PACKAGE / "functional.py")}
    assert foreign <= {*sys.stdlib_module_names, "mrla_mm", "torch"}
