"""DESIGN: arrows point down only, and the package imports without a GPU and without Triton."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mrla_mm"
ANYONE = {"arguments", "errors", "notices", "version"}
ALLOWED = {
    "ops": set(),
    "attention": {"ops"},
    "backbones": {"attention", "ops"},
    "necks": set(),
    "weights": set(),
    "compat": set(),
    "config": set(),
    "datasets": set(),
    "analysis": {"attention", "config", "ops"},
}
ROOMS = [room for room in ALLOWED if (PACKAGE / room).is_dir()]


def imported(path: Path) -> set[str]:
    """Dotted names a file imports, wherever in the file it does."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports, so that this test can read them"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_lies_below_them(room):
    for path in (PACKAGE / room).rglob("*.py"):
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("mrla_mm.")}
        forbidden = ours - ALLOWED[room] - ANYONE - {room}
        assert not forbidden, f"{path.relative_to(PACKAGE)} imports {sorted(forbidden)}"


def test_ops_import_torch_alone():
    standard = set(sys.stdlib_module_names)
    for path in (PACKAGE / "ops").rglob("*.py"):
        foreign = {name.split(".")[0] for name in imported(path)} - standard - {"mrla_mm", "torch", "triton"}
        assert not foreign, f"{path.relative_to(PACKAGE)} imports {sorted(foreign)}"


def test_imports_without_gpu_and_without_triton():
    code = "import sys; sys.modules['triton'] = None; import mrla_mm, torch; assert mrla_mm.__version__"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
