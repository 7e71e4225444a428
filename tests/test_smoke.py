"""The real command line tools, end to end: the real configs train, save, evaluate, test and resume."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from .conftest import ROOT, tiny_options
from .docs_fences import commands

REAL_COCO = ROOT.parent / "shared/data/coco_tiny"
pytestmark = pytest.mark.slow


def config_path(name):
    return ROOT / "configs" / f"{name}.py"


def environment():
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    own = dict(PYTHONPATH=os.pathsep.join(paths), PYTHON=sys.executable, OMP_NUM_THREADS="1", PORT=str(port))
    return {**os.environ, **own}


def command(tool, *argv):
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, argv)]


def run_command(*argv, cwd):
    return subprocess.run([*map(str, argv)], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=1200)


def scalars(work_dir):
    """Every line of logged figures, of all runs in a work directory in the order of time."""
    files = sorted(work_dir.glob("*/vis_data/scalars.json"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def val_figures(work_dir):
    return [
        {k: v for k, v in line.items() if k.startswith("coco/")}
        for line in scalars(work_dir)
        if "coco/bbox_mAP" in line
    ]


def test_figures(work_dir):
    newest = max(work_dir.glob("2*/2*.json"), key=lambda path: path.stat().st_mtime)
    return {k: v for k, v in json.loads(newest.read_text()).items() if k.startswith("coco/")}


test_figures.__test__ = False


@pytest.mark.parametrize(
    "name",
    [
        "retinanet_r50_mrla_light_1x",
        "faster_rcnn_r50_mrla_light_1x",
        "mask_rcnn_r50_mrla_light_1x",
        "mask_rcnn_r50_mrla_base_1x",
        "retinanet_deit_t_mrla_light_1x",
        "retinanet_efficientnet_b0_mrla_light_1x",
    ],
)
def test_train_test_resume(name, coco_root, tmp_path, run_tool):
    """One epoch trains, saves and evaluates; its checkpoint tests to the same figures; the run resumes at epoch two.

    Neither the test nor the resumed run asks for the weights that the config starts from.
    """
    work_dir, options = tmp_path / "run", tiny_options(name, coco_root)
    arguments = [config_path(name), "--work-dir", work_dir, "--cfg-options", *options]
    assert run_tool("train", *arguments, "train_cfg.max_epochs=1")[0] == 0
    losses = [line["loss"] for line in scalars(work_dir) if "loss" in line]
    assert len(losses) == 3 and all(0 < loss < 100 for loss in losses)
    checkpoint = work_dir / "epoch_1.pth"
    assert torch.load(checkpoint, weights_only=True)["meta"]["epoch"] == 1
    (trained,) = val_figures(work_dir)
    assert trained["coco/AR@100"] >= 0  # -1 if there was nothing to find

    gone = dict(type="Pretrained", checkpoint=str(tmp_path / "gone.pth"))
    start = [f"model.backbone.init_cfg.{key}={value}" for key, value in gone.items()]
    options = [*start, *(option for option in options if option != "model.backbone.init_cfg=None")]
    arguments = [config_path(name), "--work-dir", work_dir, "--cfg-options", *options]
    dump = tmp_path / "predictions.pkl"
    test_dir = tmp_path / "test"
    argv = [config_path(name), checkpoint, "--work-dir", test_dir, "--out", dump, "--cfg-options", *options]
    assert run_tool("test", *argv)[0] == 0
    assert test_figures(test_dir) == trained
    with dump.open("rb") as file:
        predictions = pickle.load(file)
    assert len(predictions) == 6 and all(len(p["pred_instances"]["bboxes"]) > 0 for p in predictions)
    assert ("masks" in predictions[0]["pred_instances"]) == name.startswith("mask")

    time.sleep(1)  # mmengine names a run by the second it starts in
    assert run_tool("train", *arguments, "train_cfg.max_epochs=2", "--resume")[0] == 0
    epochs = [line["epoch"] for line in scalars(work_dir) if "loss" in line]
    assert epochs == [1, 1, 1, 2, 2, 2]
    resumed = torch.load(work_dir / "epoch_2.pth", weights_only=True)
    assert (resumed["meta"]["epoch"], resumed["meta"]["iter"]) == (2, 6)


def test_killed_run_resumes(coco_root, tmp_path):
    """Killed in its second epoch, a run started from the command line resumes from the first and ends."""
    name = "faster_rcnn_r50_mrla_light_1x"
    options = tiny_options(name, coco_root, "train_cfg.max_epochs=2", "train_cfg.val_interval=2")
    train = command("train", config_path(name), "--work-dir", "run", "--resume", "--cfg-options", *options)
    process = subprocess.Popen(train, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seen = b""
    for line in process.stdout:
        seen += line
        if b"Epoch(train) [2][1/3]" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL, seen.decode()
    assert b"starts from scratch" in seen
    resumed = run_command(*train, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed epoch: 1, iter: 3" in resumed.stdout + resumed.stderr
    assert (tmp_path / "run/epoch_2.pth").is_file() and val_figures(tmp_path / "run")


@pytest.mark.skipif(not REAL_COCO.is_dir(), reason="no real COCO images at ../shared/data/coco_tiny")
@pytest.mark.parametrize("backbone", ["r50", "deit_t", "ceit_t", "pvtv2_b0"])
def test_real_coco_images(backbone, tmp_path, run_tool):
    """Mask R-CNN trains and evaluates on real COCO images, with polygons, crowds and all 80 classes."""
    name = f"mask_rcnn_{backbone}_mrla_light_1x"
    options = tiny_options(name, REAL_COCO, "train_cfg.max_epochs=1", "train_dataloader.dataset.indices=4")
    options += ["val_dataloader.dataset.indices=2", "train_dataloader.dataset.pipeline.2.scale=(160,120)"]
    code, errors = run_tool("train", config_path(name), "--work-dir", tmp_path, "--cfg-options", *options)
    assert code == 0, errors
    losses = [line["loss_mask"] for line in scalars(tmp_path) if "loss_mask" in line]
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)
    assert (tmp_path / "epoch_1.pth").is_file() and val_figures(tmp_path)


@pytest.mark.parametrize("detector", ["retinanet", "mask_rcnn"])
def test_the_documented_try_on_a_cpu(detector, coco_root, tmp_path, run_tool):
    """The command of docs/train_on_coco.md, changed as it says for two-stage detectors, ends with an evaluation."""
    (shown,) = (command.words for command in commands() if "work_dirs/try_out" in command.words)
    head = "model.test_cfg" if detector == "retinanet" else "model.test_cfg.rcnn"
    words = [word.replace("model.test_cfg", head).replace("320,192", "96,64") for word in shown[3:]]
    words[words.index("work_dirs/try_out")] = tmp_path
    small = tiny_options("_r50_", coco_root)
    small = [option for option in small if re.match(r"data_root|model\.(backbone\.depth|neck)", option)]
    small += ["train_dataloader.dataset.indices=4", "val_dataloader.dataset.indices=2", f"{head}.max_per_img=5"]
    code, errors = run_tool("train", config_path(f"{detector}_r50_mrla_light_1x"), *words, *small)
    assert code == 0, errors
    assert [line["epoch"] for line in scalars(tmp_path) if "loss" in line][-1] == 2
    assert len(val_figures(tmp_path)) == 2 and (tmp_path / "epoch_2.pth").is_file()


def test_two_processes(coco_root, tmp_path):
    """dist_train.sh trains with two processes that share each epoch, and dist_test.sh evaluates what they saved."""
    name = "retinanet_r50_mrla_base_1x"
    options = tiny_options(name, coco_root, "train_cfg.max_epochs=1", "env_cfg.dist_cfg.backend=gloo")
    train = [ROOT / "tools/dist_train.sh", config_path(name), 2, "--work-dir", "run", "--cfg-options", *options]
    trained = run_command(*train, "train_dataloader.batch_size=1", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert len([line for line in scalars(tmp_path / "run") if "loss" in line]) == 3
    tool = [ROOT / "tools/dist_test.sh", config_path(name), "run/epoch_1.pth", 2, "--work-dir", "test"]
    tested = run_command(*tool, "--cfg-options", *options, cwd=tmp_path)
    assert tested.returncode == 0, tested.stderr
    assert test_figures(tmp_path / "test") == val_figures(tmp_path / "run")[0]


def test_errors_without_traceback(coco_root, tmp_path):
    """A user's mistake ends a real command with one line and code 2, from the packed tools too."""
    name = "retinanet_r50_mrla_light_1x"
    failed = run_command(*command("train", config_path(name)), cwd=tmp_path)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    assert (
        failed.stderr.strip().splitlines()[-1].startswith("error: train data: annotation file data/coco/annotations/")
    )
    packed = [sys.executable, "-m", "mrla_mm", "train", f"mrla_mm::{name}.py", "--amp"]
    failed = run_command(*packed, cwd=tmp_path)
    assert failed.returncode == 2
    assert "error: mixed precision" in failed.stderr or torch.cuda.is_available()
