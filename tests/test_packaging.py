"""The built package works without this repository: its wheel alone, from a user's own folder."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from .conftest import ROOT, tiny_options, write_coco
from .docs_fences import fences
from .test_smoke import scalars

pytestmark = pytest.mark.slow


def run(*argv, cwd, **variables):
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source, target):
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", target, source, cwd=target)
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources: building leaves folders behind."""
    kept = ("mrla_mm", "configs", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE", "model-index.yml")
    copy = tmp_path_factory.mktemp("source")
    for name in kept:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def packed(folder):
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".yml")]
    return {f"mrla_mm/.mim/{path.relative_to(ROOT)}" for path in paths}


def test_wheel_and_source_distribution_carry_every_config_and_tool(wheel, source, tmp_path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert packed("configs") | packed("tools") | {"mrla_mm/.mim/model-index.yml"} <= names
    assert {f"{path.relative_to(ROOT)}" for path in (ROOT / "mrla_mm").rglob("*.py")} <= names
    assert not [name for name in names if name.startswith(("tests", "configs", "tools"))]

    run("setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    again = build_wheel(archive, tmp_path)
    assert set(zipfile.ZipFile(again).namelist()) == names


def write_pets(root):
    """Write the data set that the README's config for a project of one's own names."""
    write_coco(root, names=("cat", "dog"))
    (root / "train2017").rename(root / "images")
    for name in ("train.json", "val.json"):
        shutil.copy(root / "annotations/instances_train2017.json", root / name)


def test_a_project_outside_the_repository_trains_from_the_wheel(wheel, tmp_path):
    """The README's config, the same as the documentation's, with nothing changed but the size of model and images."""
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(site)
    write_pets(project / "pets")
    shown = {fence.page: fence.text for fence in fences("python") if fence.text.startswith("# my_config.py\n")}
    assert set(shown) == {"README.md", "docs/use_in_your_project.md"} and len(set(shown.values())) == 1
    (project / "my_config.py").write_text(shown["README.md"])
    smaller = [option for option in tiny_options("mask_rcnn_r50_", "") if not option.startswith("data_root=")]
    where = run("-c", "import mrla_mm; print(mrla_mm.__file__)", cwd=project, PYTHONPATH=str(site))
    assert where.strip() == str(site / "mrla_mm/__init__.py")

    train = ["-m", "mrla_mm", "train", "my_config.py", "--cfg-options", *smaller, "train_cfg.max_epochs=1"]
    run(*train, cwd=project, PYTHONPATH=str(site))
    work_dir = project / "work_dirs/my_config"
    assert (work_dir / "epoch_1.pth").is_file()
    figures = scalars(work_dir)
    assert [line["loss_mask"] > 0 for line in figures if "loss_mask" in line] == [True] * 3
    assert any("coco/segm_mAP" in line for line in figures)
