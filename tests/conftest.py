"""Shared by every test: the package is imported first, so that mmdet finds its operators."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import config
from mmengine.config import utils as config_utils

import mrla_mm  # noqa: F401
from mrla_mm.torch_support import has_named_safe_globals

torch.set_num_threads(1)  # more threads only wait for each other on tensors this small
torch.backends.cudnn.allow_tf32 = False  # results are compared with those in float64
ROOT = Path(__file__).parents[1]


def speed_up_configs():
    """Skip what mmengine takes longest for in short runs: looking up bases, formatting configs."""
    config_utils.load = functools.cache(config_utils.load)
    for name in ("is_installed", "get_installed_path", "_get_external_cfg_path"):
        setattr(config, name, functools.cache(getattr(config, name)))
    config.FormatCode = lambda text, **_: (text, True)


speed_up_configs()


needs_recent_torch = pytest.mark.skipif(
    not has_named_safe_globals, reason="torch before 2.6: float16 on a CPU, Dynamo, nested files"
)
FLOAT16 = pytest.param(torch.float16, marks=needs_recent_torch)


def write_coco(root, images=4, size=(96, 64), names=None):
    """Write a set as COCO's: bright rectangles of three of `names`, by default COCO's classes."""
    if names is None:
        from mmdet.datasets import CocoDataset

        names = CocoDataset.METAINFO["classes"]
    rng = np.random.default_rng(0)
    categories = [dict(id=number + 1, name=name) for number, name in enumerate(names)]
    for split in ("train2017", "val2017"):
        (root / split).mkdir(parents=True)
        infos, annotations = [], []
        for index in range(images):
            image = rng.integers(0, 60, (size[1], size[0], 3), dtype=np.uint8)
            name = f"{index:06}.jpg"
            infos.append(dict(id=index + 1, file_name=name, width=size[0], height=size[1]))
            for column in range(2):
                label = int(rng.integers(min(3, len(names))))
                x, y = column * size[0] // 2 + int(rng.integers(8)), int(rng.integers(size[1] // 4))
                w, h = int(rng.integers(20, 36)), int(rng.integers(20, 36))
                image[y : y + h, x : x + w] = 90
                image[y : y + h, x : x + w, label] = 250
                corners = [x, y, x + w, y, x + w, y + h, x, y + h]
                box = dict(bbox=[x, y, w, h], area=w * h, segmentation=[corners], iscrowd=0)
                ids = dict(id=len(annotations) + 1, image_id=index + 1, category_id=label + 1)
                annotations.append(ids | box)
            cv2.imwrite(str(root / split / infos[-1]["file_name"]), image)
        path = root / "annotations" / f"instances_{split}.json"
        path.parent.mkdir(exist_ok=True)
        content = dict(images=infos, annotations=annotations, categories=categories)
        path.write_text(json.dumps(content))
    return root


def write_class_folders(root, classes=("bird", "cat", "dog"), images=(8, 4), size=(48, 64)):
    rng = np.random.default_rng(0)
    for split, count in zip(("train", "val"), images, strict=True):
        for label, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                image = rng.integers(0, 60, (*size, 3), dtype=np.uint8)
                image[8:40, 8:40, label % 3] = 250
                cv2.imwrite(str(folder / f"{index}.jpg"), image)
    return root


@pytest.fixture(scope="session")
def coco_root(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"))


def load_tool(name):
    """Return a tool as a module, by its name in tools/ or its path below the repository."""
    path = ROOT / (name if name.endswith(".py") else f"tools/{name}.py")
    spec = importlib.util.spec_from_file_location(f"tool_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget_runs():
    from mmdet.visualization import DetLocalVisualizer
    from mmengine.logging import MessageHub, MMLogger

    for shared in (DetLocalVisualizer, MessageHub, MMLogger):
        shared._instance_dict.clear()


@pytest.fixture
def run_tool(capsys):
    """Return `run(name, *argv)`, which runs a tool here: its exit code and its stderr."""
    from mrla_mm import cli

    def run(name, *argv):
        forget_runs()
        capsys.readouterr()
        code = cli.run(load_tool(name).main, [str(arg) for arg in argv])
        return code, capsys.readouterr().err

    return run


def environment(**variables):
    """Return the variables of a process that finds the package and computes in one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


@contextlib.contextmanager
def in_use(folder):
    """Let another process lock a folder."""
    code = "import sys; from mrla_mm.atomic import lock_folder\n"
    code += "with lock_folder(sys.argv[1], ''): print(flush=True); sys.stdin.read()"
    options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], **options) as process:
        process.stdout.readline()
        yield
        process.stdin.close()


def run_python(*argv, cwd=None, **variables):
    """Run Python with arguments in a process that finds the package; return what it prints."""
    options = dict(cwd=cwd, capture_output=True, text=True, timeout=1200)
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(command, env=environment(**variables), **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tiny_options(config, root, *more):
    """Return --cfg-options that shrink a detector config to seconds on the data at `root`."""
    options = [
        f"data_root={root}",
        "model.backbone.init_cfg=None",
        "train_dataloader.dataset.pipeline.2.scale=(96,64)",
        "default_hooks.logger.interval=1",
        "param_scheduler.0.end=2",
    ]
    if re.search(r"_r\d+_", config):
        options += ["model.backbone.depth=18", "model.backbone.frozen_stages=-1"]
        options.append("model.neck.in_channels=[64,128,256,512]")
    for phase in ("train", "val", "test"):
        options.append(f"{phase}_dataloader.num_workers=0")
        options.append(f"{phase}_dataloader.persistent_workers=False")
    for phase in ("val", "test"):
        options.append(f"{phase}_dataloader.dataset.pipeline.1.scale=(96,64)")
        # Recall of class-blind boxes is above zero after a step or two: figures to compare.
        segm = "segm," if "mask" in config else ""
        options.append(f"{phase}_evaluator.metric=[bbox,{segm}proposal]")
    head = "model.test_cfg"
    if "rcnn" in config:
        head = "model.test_cfg.rcnn"
        options += [
            "model.roi_head.bbox_head.fc_out_channels=64",
            "model.train_cfg.rcnn.sampler.num=64",
            "model.train_cfg.rpn_proposal.max_per_img=100",
            "model.test_cfg.rpn.max_per_img=100",
        ]
    if "mask" in config:
        options.append("model.roi_head.mask_head.num_convs=1")
    return [*options, f"{head}.score_thr=0.0", f"{head}.max_per_img=30", *more]
