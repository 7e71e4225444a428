"""The design's layers: imports point down only, and the equations need torch alone."""

import ast
import importlib
import re
import sys

import pytest

import mrla_mm

from .conftest import ROOT, run_python

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
    "cli": FOLDERS | {"config", "inference"},
    "training": FOLDERS | {"cli"},
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


def test_help_waits_for_no_model_and_no_plot():
    code = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(path, run_name="__main__")
    assert said.getvalue(), path
imported = {"matplotlib", "mmdet", "mmpretrain", "onnx", "torchvision"} & set(sys.modules)
assert not imported, imported
from mmengine.registry import MODELS
assert type(MODELS.build(dict(type="MRLAResNet", depth=18))) is MODELS.get("MRLAResNet")
"""
    tools = sorted((ROOT / "tools").glob("*.py"))
    run_python("-c", code, *tools)


@pytest.mark.parametrize(("registry", "module", "names"), mrla_mm.BUILT_LATER)
def test_names_that_are_registered_before_their_classes(registry, module, names):
    importlib.import_module(f"mrla_mm.{module}")
    others = [path for _, path, _ in mrla_mm.BUILT_LATER if path.startswith(f"{module}.")]
    theirs = []
    for name, found in registry.module_dict.items():
        path = found.__module__.removeprefix("mrla_mm.")
        if path.startswith(module) and path not in others:
            theirs.append(name)
    assert sorted(theirs) == sorted(names.split())
