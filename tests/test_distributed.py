"""Several processes stop together at SIGTERM."""

import os
import subprocess
import sys

import pytest
import torch

from mrla_mm.datasets import generate_shapes

from .conftest import ROOT

CONFIG = ROOT / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"


@pytest.mark.slow
def test_processes_stop_together_at_sigterm(tmp_path):
    """SIGTERM to the launcher ends every process at one iteration, with one checkpoint."""
    generate_shapes(tmp_path / "data", num_train=6, num_val=2, seed=0)
    options = [f"data_root={tmp_path}/data", "env_cfg.dist_cfg.backend=gloo"]
    options += ["train_cfg.max_epochs=100", "train_cfg.val_interval=1000"]
    options += ["default_hooks.logger.interval=1", "train_dataloader.batch_size=1"]
    options += ["train_dataloader.dataset.pipeline.2.scale=(64,64)"]
    options += ["model.roi_head.bbox_head.fc_out_channels=16"]
    script = [ROOT / "tools/dist_train.sh", CONFIG, "2", "--work-dir", tmp_path / "run"]
    script += ["--cfg-options", *options]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHON=sys.executable, OMP_NUM_THREADS="1")
    environment |= dict(PORT=str(20000 + os.getpid() % 20000), CUDA_VISIBLE_DEVICES="")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(script, env=environment, **pipes)
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
