"""Arguments of the command line tools, the config they lead to, and how errors end a tool."""

import logging
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config

import mrla_mm
from mrla_mm import __main__ as entry
from mrla_mm import cli, training
from mrla_mm.errors import InputError

from .conftest import ROOT, environment, in_use, load_tool, run_python, tiny_options, write_coco

RETINANET = ROOT / "configs/retinanet_r50_mrla_light_1x.py"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def plan(monkeypatch):
    """Return `plan(tool, *argv)`, which runs a tool up to its runner and returns the config."""

    def run_up_to_the_runner(tool, *argv, config=RETINANET):
        built = []
        runner = SimpleNamespace(logger=logging.getLogger("plan"), model=torch.nn.Module())
        runner.train = runner.test = lambda: None
        runner.test_evaluator = SimpleNamespace(metrics=[])

        def build(cfg, *phases):
            built.append(cfg)
            return runner

        monkeypatch.setattr(training, "build_runner", build)
        load_tool(tool).main([str(config), *map(str, argv)])
        return built[0]

    return run_up_to_the_runner


def write_config(text):
    Path("own.py").write_text(text)
    return "own.py"


def test_options_reach_the_config(plan):
    assert plan("train").work_dir == "work_dirs/retinanet_r50_mrla_light_1x"
    assert os.environ.pop("LOCAL_RANK") == "0"
    options = ["model.backbone.init_cfg=None", "model.neck.in_channels=[1,2]", "work_dir=v"]
    cfg = plan("train", "--work-dir", "w", "--local-rank", 3, "--cfg-options", *options)
    assert cfg.model.backbone.init_cfg is None and cfg.model.neck.in_channels == [1, 2]
    assert cfg.work_dir == "w"
    assert os.environ["LOCAL_RANK"] == "3"
    options = ["data_root=/my data/a,b", "work_dir='of one word'", "model.neck.in_channels=[1, 2]"]
    cfg = plan("train", "--local_rank", 1, "--cfg-options", *options)
    assert cfg.train_dataloader.dataset.data_root == "/my data/a,b/"
    assert cfg.work_dir == "of one word" and cfg.model.neck.in_channels == [1, 2]
    assert os.environ["LOCAL_RANK"] == "3"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("('traffic light', 'stop sign')", ("traffic light", "stop sign")),
        ("{'type': 'MRLABase', 'head_channels': 16}", dict(type="MRLABase", head_channels=16)),
        ("[8, 11]", [8, 11]),
        ("[bbox,segm]", ["bbox", "segm"]),
        ("true", True),
        ("None", None),
        ("1e-3", 1e-3),
        ("a text of words", "a text of words"),
    ],
)
def test_values_of_options(plan, text, value):
    cfg = plan("train", "--cfg-options", f"model.test_cfg.own={text}")
    assert cfg.model.test_cfg.own == value
    assert type(cfg.model.test_cfg.own) is type(value) or isinstance(value, dict)


@pytest.mark.parametrize(
    "option", ["a=[one sign,b]", "a=(1,2", "a=dict(b=1,c=2)", "train_cfg.max_epochs"]
)
def test_options_that_cannot_be_read_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        load_tool("train").main([str(RETINANET), "--cfg-options", option])
    assert option in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "near"),
    [
        (["model.backbone.type=MRLAResnet"], "MRLAResNet"),
        (["model.backbone.layer_atention=MRLABase"], "layer_attention"),
        (["model.backbone.layer_attention.head_chanels=8"], "head_channels"),
        (["optim_wrapper.optimizer.nestrov=True"], "nesterov"),
    ],
)
def test_misspelt_types_and_arguments_are_told_with_the_nearest(options, near, run_tool, tmp_path):
    root = write_coco(tmp_path / "coco")
    options = [*tiny_options("retinanet_r50", root), *options]
    code, errors = run_tool("train", RETINANET, "--cfg-options", *options)
    assert code == 2 and errors.splitlines()[-1].endswith(f"did you mean {near}?")


def test_amp_and_scaled_learning_rate(plan, monkeypatch):
    monkeypatch.setattr("mmengine.device.get_device", lambda: "cuda")
    cfg = plan("train", "--amp", "--auto-scale-lr", "--cfg-options", "auto_scale_lr.enable=False")
    assert (cfg.optim_wrapper.type, cfg.optim_wrapper.loss_scale) == ("AmpOptimWrapper", "dynamic")
    assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=16)
    with pytest.raises(InputError, match="base_batch_size"):
        plan("train", "--auto-scale-lr", config=write_config("optim_wrapper = dict()"))
    monkeypatch.setattr("mmengine.device.get_device", lambda: "cpu")
    with pytest.raises(InputError, match="BFloat16OptimWrapper"):
        plan("train", "--amp")


def test_resume_takes_the_last_checkpoint_or_the_one_that_is_named(plan, tmp_path):
    cfg = plan("train", "--resume", "--work-dir", "empty", "--cfg-options", "load_from=start.pth")
    assert cfg.resume is False and cfg.load_from == "start.pth"
    cfg = plan("train", "--work-dir", "empty", "--cfg-options", "resume=True")
    assert cfg.resume is False  # mmengine would, and the weights to start from would not be read
    (tmp_path / "last_checkpoint").write_text("epoch_1.pth")
    cfg = plan("train", "--resume", "--work-dir", tmp_path)
    assert cfg.resume is True and cfg.load_from == "epoch_1.pth"
    (tmp_path / "last_checkpoint").write_text("/original/epoch_1.pth")
    (tmp_path / "epoch_1.pth").touch()
    cfg = plan("train", "--resume", "--work-dir", tmp_path)
    assert cfg.load_from == str(tmp_path / "epoch_1.pth"), "of the copied work directory"
    assert plan("train", "--resume", "own.pth", "--work-dir", tmp_path).load_from == "own.pth"


@pytest.mark.parametrize("record", [None, b"", b"\xff\xfe", b"/gone/epoch_8.pth"])
def test_resume_takes_the_newest_whole_file_where_none_is_recorded(record, plan, tmp_path):
    if record is not None:
        (tmp_path / "last_checkpoint").write_bytes(record)
    for age, name in enumerate(("epoch_10", "epoch_9", "best_epoch_11", "weights")):
        torch.save({}, tmp_path / f"{name}.pth")
        os.utime(tmp_path / f"{name}.pth", (9 - age, 9 - age))
    whole = (tmp_path / "epoch_9.pth").read_bytes()
    (tmp_path / "epoch_12.pth").write_bytes(whole[: len(whole) // 2])
    cfg = plan("train", "--resume", "--work-dir", tmp_path)
    assert cfg.load_from == str(tmp_path / "epoch_10.pth")


def test_two_trainings_do_not_share_a_folder(run_tool, tmp_path):
    root = write_coco(tmp_path / "coco")
    options = tiny_options("retinanet_r50", root)
    with in_use(tmp_path / "run"):
        code, errors = run_tool(
            "train", RETINANET, "--work-dir", tmp_path / "run", "--cfg-options", *options
        )
    assert code == 2 and "in use" in errors


def test_a_loss_that_is_not_finite_ends_the_training(run_tool, tmp_path):
    root = write_coco(tmp_path / "coco")
    options = [*tiny_options("retinanet_r50", root), "optim_wrapper.optimizer.lr=1e20"]
    options += ["train_cfg.max_epochs=3", "optim_wrapper.clip_grad=None", "val_cfg=None"]
    options += ["val_dataloader=None", "val_evaluator=None", "param_scheduler=None"]
    own = write_config(f"_base_ = '{RETINANET}'\ncustom_hooks = []")
    run = ["--work-dir", tmp_path / "run"]
    code, errors = run_tool("train", own, *run, "--cfg-options", *options)
    assert code == 2 and "nan" in errors and "optimizer.lr" in errors
    assert not list(tmp_path.glob("run/epoch_*.pth"))


def test_predictions_replace_no_checkpoint_and_can_be_written(run_tool, tmp_path):
    checkpoint = tmp_path / "weights.pkl"
    checkpoint.write_bytes(b"weights")
    (tmp_path / "file").touch()
    for out in (checkpoint, tmp_path / "out.json", tmp_path / "file/out.pkl"):
        code, errors = run_tool("test", RETINANET, checkpoint, "--out", out)
        assert code == 2 and str(out) in errors
    assert checkpoint.read_bytes() == b"weights"
    code, errors = run_tool("test", RETINANET, checkpoint, "--show-dir", tmp_path)
    assert code == 2 and str(tmp_path) in errors


def test_a_test_loads_its_checkpoint_and_shows_what_it_finds(plan):
    """--show and --show-dir set the keys of mmdet's hook, in no scope too, or of mmpretrain's."""
    own = Config.fromfile(RETINANET)
    own.pop("default_scope")
    own.dump("no_scope.py")
    show = ["--show-dir=vis", "--wait-time=0.5"]
    cfg = plan("test", "c.pth", *show, "--out=a.pkl", config="no_scope.py")
    hook = cfg.default_hooks.visualization
    assert (cfg.load_from, cfg.resume) == ("c.pth", False)
    assert (hook.draw, hook.test_out_dir, hook.show, hook.wait_time) == (True, "vis", False, 0.5)
    classifier = ROOT / "configs/imagenet/resnet50_8xb32.py"
    cfg = plan("test", "c.pth", "--show", "--show-dir", "vis", config=classifier)
    hook = cfg.default_hooks.visualization
    assert (hook.enable, hook.out_dir, hook.show) == (True, "vis", True)


def test_augmentation_at_test_time(plan):
    own = Config.fromfile(RETINANET)
    cfg = plan("test", "c.pth", "--tta")
    assert (cfg.model.type, cfg.model.module.type) == ("DetTTAModel", "RetinaNet")
    assert cfg.test_dataloader.dataset.pipeline == own.tta_pipeline
    for name in ("faster_rcnn_r50_mrla_light_1x", "quickstart/rtmdet_quarter_mrla_light"):
        cfg = plan("test", "c.pth", "--tta", config=ROOT / f"configs/{name}.py")
        *steps, last = cfg.test_dataloader.dataset.pipeline
        kinds = [step["type"] for step in steps]
        assert kinds == ["LoadImageFromFile", "Resize", "LoadAnnotations"]
        flips, (pack,) = last["transforms"]
        assert [flip["prob"] for flip in flips] == [0.0, 1.0], "the ground truth is the first's"
        assert {"flip", "flip_direction", "scale_factor", "img_shape"} <= set(pack["meta_keys"])
    with pytest.raises(InputError, match="tta_model"):
        plan("test", "c.pth", "--tta", config=ROOT / "configs/imagenet/resnet50_8xb32.py")


def test_only_input_errors_and_ctrl_c_end_in_one_line(capsys):

    def mistaken(argv):
        raise InputError("image 0.jpg cannot be read")

    assert cli.run(mistaken) == 2
    assert capsys.readouterr().err == "error: image 0.jpg cannot be read\n"
    with pytest.raises(KeyError):
        cli.run(lambda argv: {}["x"])
    assert cli.run(lambda argv: None) == 0

    def stopped(argv):
        raise KeyboardInterrupt("--resume continues")

    assert cli.run(stopped) == 130
    assert capsys.readouterr().err == "interrupted: --resume continues\n"


def test_entry_point(capsys):
    entry.main([])
    assert {"test", "demo", "quickstart"} < set(capsys.readouterr().out.splitlines())
    with pytest.raises(InputError, match="misc/print_config"):
        entry.main(["mmdet", "print_config"])
    with pytest.raises(InputError, match="there are analysis_tools/get_flops$"):
        entry.main(["mmdet", "get_flops"])
    entry.main(["--version"])
    assert mrla_mm.__version__ in capsys.readouterr().out


def test_tools_of_mmdet_know_our_names():
    config = write_config("_base_ = 'mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py'")
    said = run_python("-m", "mrla_mm", "mmdet", "misc/print_config", config)
    assert "type='MRLAResNet'" in said


def test_slurm_script_calls_srun(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    path, more = f"{tmp_path}:{os.environ['PATH']}", "--time 1:00 --quiet"
    own = environment(PATH=path, GPUS="4", SRUN_ARGS=more)
    script = [ROOT / "tools/slurm_train.sh", "part", "job", "my config.py", "--amp"]
    run = subprocess.run(script, capture_output=True, text=True, env=own, check=True)
    said = " ".join(run.stdout.splitlines())
    assert said.startswith("--partition part --job-name job --gres gpu:4 --ntasks 4 ")
    train = f"python -u {ROOT}/tools/train.py my config.py --launcher slurm --amp"
    assert said.endswith(f"--time 1:00 --quiet {train}")
