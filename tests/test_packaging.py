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
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources, in which building leaves folders behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("mrla_mm", "configs", "tools", ".dev_scripts"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "model-index.yml"):
        shutil.copy(ROOT / name, source / name)
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", target, source, cwd=target)
    return next(target.glob("*.whl"))


def test_wheel_carries_every_module_config_and_tool(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packed = [path for folder in ("configs", "tools") for path in (ROOT / folder).rglob("*.*")]
    packed = [path.relative_to(ROOT) for path in packed if path.suffix in (".py", ".sh", ".yml")]
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "mrla_mm").rglob("*.py")]
    modules = [name for name in modules if "/.mim/" not in name]
    assert names == {*modules, *(f"mrla_mm/.mim/{path}" for path in packed), "mrla_mm/.mim/model-index.yml"}


def test_a_project_outside_the_repository_trains_from_the_wheel(wheel, tmp_path):
    """The user guide's config for a project of one's own, with a smaller model and smaller images."""
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

    smaller = [option for option in tiny_options("mask_rcnn_r50_", "") if not option.startswith("data_root=")]
    train = ["-m", "mrla_mm", "train", "my_config.py", "--cfg-options", *smaller, "train_cfg.max_epochs=1"]
    run(*train, cwd=project, PYTHONPATH=str(site))
    work_dir = project / "work_dirs/my_config"
    assert (work_dir / "epoch_1.pth").is_file()
    assert all(line["loss_mask"] > 0 for line in scalars(work_dir) if "loss" in line)
    assert any("coco/segm_mAP" in line for line in scalars(work_dir))


CLASSIC = {  # an environment such as most users of mmdet 3.3 have, and what its packages ask for
    "torch": ("2.1.2", ()),
    "torchvision": ("0.16.2", ("torch==2.1.2",)),
    "numpy": ("1.26.4", ()),
    "mmengine": ("0.10.7", ("numpy", "opencv-python>=3")),
    "mmcv": ("2.1.0", ("mmengine>=0.3.0", "numpy", "opencv-python>=3")),
    "mmdet": ("3.3.0", ("numpy", "pycocotools")),
    "pycocotools": ("2.0.7", ("numpy",)),
    "setuptools": ("65.5.1", ()),
}
NEWER = dict.fromkeys((*CLASSIC, "opencv-python", "opencv-python-headless"), ("99.0", ()))
NEWER["mmcv-lite"] = ("2.1.1", ())


def write_empty_wheels(folder, packages):
    """Wheels that hold nothing but their names, versions and requirements."""
    for name, (version, requires) in packages.items():
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            lines += [f"Requires-Dist: {each}" for each in requires]
            file.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines))
            file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.parametrize("opencv", ["opencv-python", "opencv-python-headless"])
def test_installing_the_wheel_changes_no_installed_package(wheel, tmp_path, opencv):
    """pip has newer versions of everything at hand, and an mmcv-lite that would overwrite mmcv."""
    env, index = tmp_path / "env", tmp_path / "index"
    run("-m", "venv", "--without-pip", env, cwd=tmp_path)
    index.mkdir()
    mmpretrain = ("1.2.0", ("einops", "matplotlib", "numpy"))
    others = dict(mmpretrain=mmpretrain, einops=("0.8.2", ()), matplotlib=("3.10.9", ("numpy>=1.23",)))
    write_empty_wheels(index, CLASSIC | {opencv: ("4.11.0", ())} | others)

    def pip(*argv):
        python = ("-m", "pip", "--python", env / "bin/python", "--isolated")
        return set(run(*python, *argv, cwd=tmp_path, PYTHONPATH="").splitlines())

    install = ("install", "--quiet", "--no-index", "--find-links", index)
    pip(*install, "--no-deps", *CLASSIC, opencv)
    before = pip("freeze", "--all")
    write_empty_wheels(index, NEWER)
    pip(*install, wheel)
    after = pip("freeze", "--all")
    assert before < after  # what was there has its version still
    assert {re.split("==| @ ", line)[0] for line in after - before} == {"mrla_mm", *others}


def test_without_mmcv_one_line_says_what_to_install(tmp_path):
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("mmcv"):
            (tmp_path / path.name).symlink_to(path)
    command = [sys.executable, "-S", "-c", "import mrla_mm"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert "needs mmcv" in last and "pip install mrla_mm[lite]" in last
