"""The built package works without this repository: its wheel alone, from a user's own folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from .conftest import ROOT, tiny_options, write_coco
from .docs_fences import fences
from .test_smoke import scalars

pytestmark = pytest.mark.slow


def run(*argv, cwd, **variables):
    """Run Python with arguments; return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources, in which building leaves folders behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("mrla_mm", "configs", "tools", ".dev_scripts"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "model-index.yml"):
        shutil.copy(ROOT / name, source / name)
    pip = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", target]
    run(*pip, source, cwd=target, REPOSITORY_URL="https://github.com/us/mrla_mm")
    return next(target.glob("*.whl"))


def test_wheel_carries_every_module_config_and_tool(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packed = [path for folder in ("configs", "tools") for path in (ROOT / folder).rglob("*.*")]
    packed = [path.relative_to(ROOT) for path in packed if path.suffix in (".py", ".sh", ".yml")]
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "mrla_mm").rglob("*.py")]
    modules = [name for name in modules if "/.mim/" not in name]
    assert names == {*modules, *(f"mrla_mm/.mim/{path}" for path in [*packed, "model-index.yml"])}


def test_the_wheel_asks_for_mmpretrain_alone_and_its_readme_has_no_relative_link(wheel):
    """pip replaces nothing, and puts no mmcv-lite beside an mmcv; mmpretrain asks for neither."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = archive.read(name).decode()
    assert "](https://github.com/us/mrla_mm/raw/HEAD/docs/_static/method.svg)" in metadata
    assert re.findall("^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE) == ["mmpretrain>=1.0.0"]
    assert all("://" in target for target in re.findall(r"\]\(([^)]*)\)", metadata))


def test_a_project_outside_the_repository_trains_from_the_wheel(wheel, tmp_path):
    """The user guide's config for one's own project, with a smaller model and images."""
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(site)
    pets = write_coco(project / "pets", names=("cat", "dog"))
    (pets / "train2017").rename(pets / "images")
    for name in ("train.json", "val.json"):
        shutil.copy(pets / "annotations/instances_train2017.json", pets / name)
    (shown,) = (f for f in fences("python") if f.text.startswith("# my_config.py\n"))
    (project / "my_config.py").write_text(shown.text)
    where = run("-c", "import mrla_mm; print(mrla_mm.__file__)", cwd=project, PYTHONPATH=str(site))
    assert where.strip() == str(site / "mrla_mm/__init__.py")

    options = tiny_options("mask_rcnn_r50_", "", "train_cfg.max_epochs=1")
    options.remove("data_root=")
    train = ["-m", "mrla_mm", "train", "my_config.py", "--cfg-options", *options]
    run(*train, cwd=project, PYTHONPATH=str(site))
    work_dir = project / "work_dirs/my_config"
    assert (work_dir / "epoch_1.pth").is_file()
    assert all(line["loss_mask"] > 0 for line in scalars(work_dir) if "loss" in line)
    assert any("coco/segm_mAP" in line for line in scalars(work_dir))


NEEDED = [("mmcv", "mrla_mm[lite]"), ("mmpretrain", "mmpretrain")]


@pytest.mark.parametrize(("package", "remedy"), NEEDED)
def test_without_a_package_one_line_says_what_to_install(package, remedy, tmp_path):
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(package):
            (tmp_path / path.name).symlink_to(path)
    command = [sys.executable, "-S", "-c", "import mrla_mm"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert f"needs {package}:" in last and last.endswith(f"pip install {remedy}")
