"""The command line tools end to end: configs train, save, evaluate, test and resume."""

import json
import pickle
import socket
import subprocess
import sys
import time

import pytest
import torch

from mrla_mm.datasets import generate_shapes

from .conftest import ROOT, environment, tiny_options

REAL_COCO = ROOT.parent / "shared/data/coco_tiny"


def config_path(name):
    return ROOT / "configs" / f"{name}.py"


def start(script, *argv, **variables):
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    own = environment(PYTHON=sys.executable, PORT=port, **variables)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen([ROOT / "tools" / script, *map(str, argv)], env=own, **pipes)


def scalars(work_dir):
    files = sorted(work_dir.glob("*/vis_data/scalars.json"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def coco_figures(line):
    return {key: value for key, value in line.items() if key.startswith("coco/")}


def val_figures(work_dir):
    return [coco_figures(line) for line in scalars(work_dir) if "coco/bbox_mAP" in line]


def figures_of_test(work_dir):
    newest = max(work_dir.glob("2*/2*.json"), key=lambda path: path.stat().st_mtime)
    return coco_figures(json.loads(newest.read_text()))


DEIT = "transformers/retinanet_deit_t_mrla_light_1x"
real = pytest.mark.skipif(not REAL_COCO.is_dir(), reason=f"no images at {REAL_COCO}")


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("retinanet_r50_mrla_light_1x", None),
        ("faster_rcnn_r50_mrla_base_1x", None),
        pytest.param("mask_rcnn_r50_mrla_light_1x", REAL_COCO, marks=real),
        pytest.param(DEIT, None, marks=pytest.mark.slow),
    ],
)
def test_train_test_resume(name, root, coco_root, tmp_path, run_tool):
    data = root or coco_root
    work_dir, options = tmp_path / "run", tiny_options(name, data)
    if root:
        options += ["train_dataloader.dataset.indices=4"]
        options += ["train_dataloader.dataset.pipeline.2.scale=(160,120)"]
    arguments = [config_path(name), "--work-dir", work_dir, "--cfg-options", *options]
    assert run_tool("train", *arguments, "train_cfg.max_epochs=1")[0] == 0
    losses = [line["loss"] for line in scalars(work_dir) if "loss" in line]
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)
    checkpoint = work_dir / "epoch_1.pth"
    assert torch.load(checkpoint)["meta"]["epoch"] == 1
    (trained,) = val_figures(work_dir)
    assert trained["coco/AR@100"] >= 0  # -1 would mean that there was nothing to find
    dump, test_dir = tmp_path / "predictions.pkl", tmp_path / "test"
    argv = [config_path(name), checkpoint, "--work-dir", test_dir, "--out", dump]
    assert run_tool("test", *argv, "--cfg-options", *options)[0] == 0
    assert figures_of_test(test_dir) == trained
    predictions = [each["pred_instances"] for each in pickle.loads(dump.read_bytes())]
    images = json.loads((data / "annotations/instances_val2017.json").read_text())["images"]
    assert len(predictions) == len(images)
    assert all(len(each["bboxes"]) for each in predictions)
    assert ("masks" in predictions[0]) == ("mask" in name)
    time.sleep(1)  # mmengine names a run by the second it starts in
    arguments += ["train_cfg.max_epochs=2", "train_cfg.val_interval=9", "--resume"]
    arguments += ["--cfg-options", "param_scheduler.0.end=3"]
    assert run_tool("train", *arguments)[0] == 0
    assert [line["epoch"] for line in scalars(work_dir) if "loss" in line] == [1, 1, 2, 2]
    resumed = torch.load(work_dir / "epoch_2.pth")
    assert (resumed["meta"]["epoch"], resumed["meta"]["iter"]) == (2, 4)
    log = max(work_dir.glob("*/*.log")).read_text()
    assert log.count("KEEPS THE CHECKPOINT'S") == log.count("param_scheduler.0 KEEPS THE") == 1


@pytest.mark.slow
def test_two_processes(coco_root, tmp_path):
    name = "retinanet_r50_mrla_base_1x"
    options = ["--cfg-options", *tiny_options(name, coco_root, "train_cfg.max_epochs=1")]
    train = ["dist_train.sh", config_path(name), 2, "--work-dir", tmp_path / "run", *options]
    test = ["dist_test.sh", config_path(name), tmp_path / "run/epoch_1.pth", 2]
    test += ["--work-dir", tmp_path / "test", *options]
    for command in ([*train, "train_dataloader.batch_size=1"], test):
        process = start(*command, CUDA_VISIBLE_DEVICES="")
        said, _ = process.communicate(timeout=1200)
        assert process.returncode == 0, said
    assert len([line for line in scalars(tmp_path / "run") if "loss" in line]) == 2
    assert figures_of_test(tmp_path / "test") == val_figures(tmp_path / "run")[0]


@pytest.mark.slow
def test_processes_stop_together_at_sigterm(tmp_path):
    generate_shapes(tmp_path / "data", num_train=6, num_val=2, seed=0)
    options = [f"data_root={tmp_path}/data"]
    options += ["train_cfg.max_epochs=100", "train_cfg.val_interval=1000"]
    options += ["default_hooks.logger.interval=1", "train_dataloader.batch_size=1"]
    options += ["train_dataloader.dataset.pipeline.2.scale=(64,64)"]
    options += ["model.roi_head.bbox_head.fc_out_channels=16"]
    config = config_path("quickstart/mask_rcnn_r18_mrla_light_shapes")
    arguments = [config, 2, "--work-dir", tmp_path / "run", "--cfg-options", *options]
    process = start("dist_train.sh", *arguments, CUDA_VISIBLE_DEVICES="")
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "[1][1/3]" in line:
            break
    process.terminate()
    seen.append(process.communicate(timeout=120)[0])
    saved = tmp_path / "run/interrupted.pth"
    assert saved.is_file(), "".join(seen)
    assert torch.load(saved)["meta"]["iter"] >= 1
