"""The built package works without this repository: its wheel alone, from a user's own folder."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from .conftest import ROOT, write_coco
from .test_smoke import scalars

pytestmark = pytest.mark.smoke

PROJECT_CONFIG = """
_base_ = "mrla_mm::mask_rcnn_r50_mrla_light_1x.py"
metainfo = dict(classes=("cat", "dog"))
model = dict(
    backbone=dict(depth=18, init_cfg=None, frozen_stages=-1),
    neck=dict(in_channels=[64, 128, 256, 512]),
    roi_head=dict(bbox_head=dict(num_classes=2), mask_head=dict(num_classes=2)),
)
common = dict(data_root="pets/", metainfo=metainfo)
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        **common, ann_file="annotations/instances_train2017.json", data_prefix=dict(img="train2017/"),
        pipeline=[
            dict(type="LoadImageFromFile"),
            dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
            dict(type="Resize", scale=(96, 64), keep_ratio=True),
            dict(type="PackDetInputs"),
        ],
    ),
)
val_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(**common, ann_file="annotations/instances_val2017.json", data_prefix=dict(img="val2017/")),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file="pets/annotations/instances_val2017.json")
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
default_hooks = dict(logger=dict(interval=1))
"""


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


def test_a_project_outside_the_repository_trains_from_the_wheel(wheel, tmp_path):
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(site)
    write_coco(project / "pets", names=("cat", "dog"))
    (project / "my_config.py").write_text(PROJECT_CONFIG)
    where = run("-c", "import mrla_mm; print(mrla_mm.__file__)", cwd=project, PYTHONPATH=str(site))
    assert where.strip() == str(site / "mrla_mm/__init__.py")

    run("-m", "mrla_mm", "train", "my_config.py", cwd=project, PYTHONPATH=str(site))
    work_dir = project / "work_dirs/my_config"
    assert (work_dir / "epoch_1.pth").is_file()
    figures = scalars(work_dir)
    assert [line["loss_mask"] > 0 for line in figures if "loss_mask" in line] == [True] * 3
    assert any("coco/segm_mAP" in line for line in figures)
