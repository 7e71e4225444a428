"""Several processes: the same gradients as one, a common stop at SIGTERM, and no hang when one of them dies."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from mmengine.model import convert_sync_batchnorm
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.datasets import generate_shapes
from mrla_mm.weights import stopping

from .conftest import ROOT

CONFIG = ROOT / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(ROOT), PYTHON=sys.executable, OMP_NUM_THREADS="1")


def test_gradients_equal_those_of_one_process(tmp_path):
    """Every variant, frozen stages 0 to 4, checkpointing, exchanged statistics; find_unused_parameters is off."""
    tool = [sys.executable, ROOT / "tools/check_distributed.py", "--short", "--out", tmp_path]
    ended = subprocess.run(tool, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "distributed.json").read_text())
    assert report["processes"] == 2 and len(report["rows"]) >= 20
    assert all(row["error"] <= 1e-5 for row in report["rows"])


def test_sync_bn_reaches_the_branches_and_computes_the_same_with_frozen_statistics():
    """What the CPU can show of SyncBN: torch computes batch statistics of it on GPUs alone."""
    settings = dict(depth=18, base_channels=16, layer_attention=dict(type="MRLALight", head_channels=16))
    backbone = MODELS.build(dict(type="MRLAResNet", **settings, zero_init_attention=False, norm_eval=True)).train()
    image = torch.rand(2, 3, 33, 49)
    expected, norms = backbone(image), sum(isinstance(module, nn.BatchNorm2d) for module in backbone.modules())
    converted = convert_sync_batchnorm(backbone, "torch").train()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in converted.modules())
    assert sum(isinstance(module, nn.SyncBatchNorm) for module in converted.modules()) == norms == 28
    for level, other in zip(converted(image), expected, strict=True):
        torch.testing.assert_close(level, other, rtol=1e-4, atol=1e-5)


def start(folder, port, *more):
    options = [f"data_root={folder}/data", "env_cfg.dist_cfg.backend=gloo", "train_cfg.max_epochs=100"]
    options += ["train_cfg.val_interval=1000", "default_hooks.logger.interval=1", "train_dataloader.batch_size=1"]
    options += ["train_dataloader.dataset.pipeline.2.scale=(64,64)", "model.roi_head.bbox_head.fc_out_channels=16"]
    script = [ROOT / "tools/dist_train.sh", CONFIG, "2", "--work-dir", folder / "run", *more, "--cfg-options", *options]
    environment = dict(ENVIRONMENT, PORT=str(port), CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process, text):
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    pytest.fail("".join(seen))


def ranks_of(launcher):
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    pairs = [map(int, line.split()) for line in listed.splitlines()[1:]]
    return [pid for pid, parent in pairs if parent == launcher]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_processes_stop_together_and_end_with_one_that_dies(tmp_path):
    """SIGTERM to the launcher saves one checkpoint; a killed process ends the other with a message, in bounded time."""
    generate_shapes(tmp_path / "data", num_train=6, num_val=2, seed=0)
    port = 20000 + os.getpid() % 20000
    stopped = start(tmp_path, port)
    wait_for(stopped, "[1][1/3]")
    stopped.terminate()
    said = stopped.communicate(timeout=120)[0]
    assert "SIGTERM received: the run ends after iteration" in said, said
    assert torch.load(tmp_path / "run/interrupted.pth", weights_only=True)["meta"]["iter"] >= 1

    broken = start(tmp_path, port + 1, "--resume")
    wait_for(broken, "[2][")
    ranks = ranks_of(broken.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    said = broken.communicate(timeout=120)[0]
    assert time.monotonic() - began < 60
    assert broken.returncode == 1
    assert "rank      : 1" in said and "Signal 9 (SIGKILL)" in said, said
    assert not any(map(alive, ranks))


def test_processes_ask_each_other_about_every_two_seconds(monkeypatch):
    """Asking costs a collective: the fewer the faster the iterations are, and the slowest process decides."""
    clock, asked = [0.0], []

    def all_reduce(answer, op):
        assert op == "max"
        asked.append(clock[0])
        answer[:] = torch.maximum(answer, torch.tensor([0, -8]))  # another process would ask after 8 iterations

    monkeypatch.setattr(stopping, "get_world_size", lambda: 2)
    monkeypatch.setattr(stopping, "all_reduce", all_reduce)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
    stop = stopping.StopRequest()
    for step in range(60):
        clock[0] = step * (0.125 if step < 30 else 1.0)
        assert not stop.agreed()
    gaps = [after - before for before, after in zip(asked, asked[1:], strict=False)]
    assert gaps[0] == 0.125 and gaps[1] == 8 * 0.125
    assert gaps[-1] == 2.0
    stop.note()
    assert any(stop.agreed() for _ in range(2))


FSDP = """
import pathlib, sys, torch
import mrla_mm
from mmengine.config import Config
from mmengine.runner import FlexibleRunner
from mrla_mm.weights import stopping
from tests.weights.test_checkpointing import Die, NoisyData, NoisyModel

torch.distributed.init_process_group("gloo")
stopping.AGREE_STEPS = 1

def run(work_dir, state, hooks=(), resume=False):
    torch.manual_seed(0)
    wrapper = dict(type="MMFullyShardedDataParallel", device_id=torch.device("cpu"), use_orig_params=True)
    runner = FlexibleRunner(
        model=NoisyModel(),
        work_dir=str(work_dir),
        strategy=dict(type="FSDPStrategy", state_dict_cfg=state, model_wrapper=wrapper),
        launcher="pytorch",
        env_cfg=dict(dist_cfg=dict(backend="gloo")),
        train_dataloader=dict(dataset=NoisyData(), batch_size=1, sampler=dict(type="DefaultSampler", shuffle=True)),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1)),
        default_hooks=dict(checkpoint=dict(type="AtomicCheckpointHook", interval=1, max_keep_ckpts=1)),
        custom_hooks=list(hooks),
        randomness=dict(seed=3),
        default_scope="mmengine",
        experiment_name=f"{work_dir.name}{resume}",
        resume=resume,
        cfg=Config(dict()),
    )
    stopped = False
    try:
        runner.train()
    except SystemExit:
        stopped = True
    return stopped, runner.iter, [part.detach().clone() for part in runner.model.parameters()]

for state in ("local", "full"):
    folder = pathlib.Path(sys.argv[1]) / state
    *_, wanted = run(folder / "whole", state)
    stopped, *_ = run(folder / "other", state, hooks=[Die(6)])
    left = folder / "other/interrupted.pth"
    torch.distributed.barrier()
    assert stopped and left.exists()
    if state == "local":
        assert sorted(path.name for path in left.iterdir()) == ["rank0.pth", "rank1.pth"]
    _, steps, found = run(folder / "other", state, resume=True)
    torch.distributed.barrier()
    assert steps == 12 and all(torch.equal(part, other) for part, other in zip(wanted, found, strict=True))
    assert [path.name for path in (folder / "other").glob("*.pth")] == ["epoch_3.pth"]
    print(f"continued {state}\\n", end="", flush=True)  # in one write: two processes share the pipe
"""


def test_fsdp_stops_at_sigterm_and_continues(tmp_path):
    """Under FlexibleRunner, from within an epoch, with a file of each process and with one: parameters end the same.

    AdamW has two tensors for each parameter, which torch alone saves as one on the CPU.
    """
    script = tmp_path / "run.py"
    script.write_text(FSDP)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29541", script]
    environment = dict(ENVIRONMENT, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1", CUDA_VISIBLE_DEVICES="")
    ended = subprocess.run(
        [*launch, tmp_path], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0 and "resumed epoch: 1, iter: 6" in said, said
    assert said.count("continued local") == said.count("continued full") == 2
