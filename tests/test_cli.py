"""Arguments and config handling of the command line tools; nothing is trained here."""

import functools
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import HOOKS
from torch.utils.data import default_collate

from mrla_mm import __main__ as entry
from mrla_mm import cli
from mrla_mm.datasets import DatasetCheckHook
from mrla_mm.errors import InputError
from mrla_mm.overrides import check_option_keys, check_top_level, move_data_root
from mrla_mm.weights.checks import check_location

from .conftest import ROOT, load_tool, tiny_options

RETINANET = ROOT / "configs/retinanet_r50_mrla_light_1x.py"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Run in an empty folder, as a user of the installed package would."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def parsed(*argv, tool="train"):
    return load_tool(tool).parse_args([str(RETINANET), *map(str, argv)])


def loaded(*argv, tool="train"):
    return cli.load_config(parsed(*argv, tool=tool))


def error_of(function, *args):
    with pytest.raises(InputError) as caught:
        function(*args)
    return str(caught.value)


def test_defaults():
    """Without options the work directory is named after the config, and nothing is overridden."""
    cfg = loaded()
    assert cfg.work_dir == "work_dirs/retinanet_r50_mrla_light_1x"
    assert cfg.launcher == "none" and os.environ["LOCAL_RANK"] == "0"
    assert cfg.model == Config.fromfile(RETINANET).model


@pytest.mark.parametrize(
    "option, said",
    [
        ("test_dataloader.dataset.ann_file=none.json", "none.json does not exist"),
        ("test_evaluator.ann_file=none.json", "none.json does not exist"),
        ("test_dataloader.dataset.type=Unheard", "test_dataloader.dataset.type='Unheard'"),
        ("test_dataloader.batchsize=2", "test_dataloader.batchsize"),
    ],
)
@pytest.mark.filterwarnings("ignore:THE BACKBONE STARTS")
def test_a_training_starts_whatever_is_wrong_with_the_test(coco_root, option, said):
    """As with mmdet: files, types and keys of the test concern tools/test.py alone."""
    cfg = loaded("--cfg-options", *tiny_options("retinanet_r50_mrla_light_1x", coco_root), option)
    cli.preflight(cfg, ("train", "val"))
    assert said in error_of(cli.preflight, cfg, ("test",))


def test_options_reach_the_config():
    """Values are parsed, None too; the command line's work directory and rank win."""
    cfg = loaded("--work-dir", "w", "--local-rank", 3, "--cfg-options", "model.backbone.init_cfg=None", "work_dir=v")
    assert cfg.model.backbone.init_cfg is None and cfg.work_dir == "w" and os.environ["LOCAL_RANK"] == "3"
    cfg = loaded("--local_rank", 1, "--cfg-options", "model.neck.in_channels=[1,2]", "optim_wrapper.optimizer.lr=0.5")
    assert cfg.model.neck.in_channels == [1, 2] and cfg.optim_wrapper.optimizer.lr == 0.5
    assert os.environ["LOCAL_RANK"] == "3", "torchrun's own value stays"


def test_data_root_moves_everything_below_it():
    """Data sets and evaluators follow data_root, also to a folder below the old one."""
    cfg = loaded("--cfg-options", "data_root=data/coco/mini")
    assert cfg.train_dataloader.dataset.data_root == cfg.test_dataloader.dataset.data_root == "data/coco/mini/"
    assert (
        cfg.val_evaluator.ann_file == cfg.test_evaluator.ann_file == "data/coco/mini/annotations/instances_val2017.json"
    )


def test_data_root_moves_nothing_else():
    """What only begins like it stays; and what is no folder cannot be moved."""
    loaders = {f"{phase}_dataloader": dict(dataset=dict(data_root=f"sets/{phase}")) for phase in ("train", "training")}
    cfg = Config(dict(data_root="sets/train", **loaders))
    move_data_root(cfg, "/new")
    assert cfg.train_dataloader.dataset.data_root == "/new/"
    assert cfg.training_dataloader.dataset.data_root == "sets/training"
    for root in ("", ["sets/train", "sets/more"]):
        assert "which is no folder" in error_of(move_data_root, Config(dict(data_root=root, **loaders)), "/new")


@pytest.mark.parametrize(
    "option, expected",
    [
        ("trian_cfg.max_epochs=1", "did you mean 'train_cfg'"),
        ("backend_args=1", "already filled in"),
        ("nonsense=1", "nothing reads a key 'nonsense'"),
    ],
)
def test_options_without_effect_are_refused(option, expected):
    """An override that nothing would read is refused."""
    assert expected in error_of(loaded, "--cfg-options", option)


def config_of(text):
    """Return the config of a file with this text over one of ours."""
    Path("mine.py").write_text(f"_base_ = {str(RETINANET)!r}\n{text}\n")
    return cli.load_config(load_tool("train").parse_args(["mine.py"]))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim_wraper", "optim_wrapper"),
        ("train_dataloder", "train_dataloader"),
        ("train_data_loader", "train_dataloader"),
        ("train_cgf", "train_cfg"),
        ("load_form", "load_from"),
        ("visualiser", "visualizer"),
    ],
)
def test_a_misspelt_top_level_key_is_named(key, meant):
    """Before anything else; the base's value would be used in its place."""
    cfg = config_of(f"# {key} is meant\n{key} = dict(_delete_=True,\n    lr=1)")
    said = error_of(cli.preflight, cfg, ("train", "val"))
    assert said == f"{key}: nothing reads a key of this name in the config; did you mean {meant!r}?"
    if meant.startswith(("optim", "train")):
        check_top_level(cfg, ("test",))


def test_variables_of_a_config_are_no_misspelt_keys():
    """Those that are used, those that only look alike, and those that nothing is near."""
    cfg = config_of("custom_hook = dict(type='EMAHook')\ncustom_hooks = [custom_hook]\nnonsense = 1")
    check_top_level(cfg, ("train", "val", "test", "tta"))
    check_top_level(config_of("optim_wraper = dict(lr=1)\noptim_wrapper = dict(optimizer=optim_wraper)"), ("train",))
    alike = ("train_pipeline", "test_pipeline", "text_cfg", "val_evaluator_2", "train_dataset", "runner", "conv_cfg")
    check_top_level(config_of("\n".join(f"{name} = 1" for name in alike)), ("train", "val", "test", "tta"))
    Path("saved.py").write_text(cfg.pretty_text)
    with pytest.warns(UserWarning, match=r"custom_hook: .* did you mean 'custom_hooks'\? A variable of your own"):
        check_top_level(Config.fromfile("saved.py"), ("test",))
    Path("saved.py").write_text(config_of("LOG_LEVEL = 'INFO'\nlog_level = LOG_LEVEL").pretty_text)
    with pytest.warns(UserWarning, match=r"LOG_LEVEL: .* did you mean 'log_level'\? A variable of your own"):
        check_top_level(Config.fromfile("saved.py"), ("test",))
    check_top_level(config_of("optim_wraper = dict(lr=1)\nnames = ['#', optim_wraper]"), ("train",))
    check_top_level(Config(dict(optim_wraper=1)), ("train",))


def test_options_below_none_are_refused():
    """What mmengine cannot merge is named, with the way out."""
    said = error_of(loaded, "--cfg-options", "model.neck=None", "model.neck.in_channels=[1,2]")
    assert "model.neck.in_channels" in said and "override the whole" in said


def test_work_dir_must_be_no_file():
    """A file given as work directory is named before anything is built."""
    Path("taken").write_text("")
    assert "taken is a file" in error_of(loaded, "--work-dir", "taken")


@pytest.mark.parametrize("option", ["lonely", "a=(1,2"])
def test_malformed_options_end_in_usage(option, capsys):
    """What is not key=value ends in the usage message with code 2."""
    with pytest.raises(SystemExit) as caught:
        parsed("--cfg-options", option)
    assert caught.value.code == 2 and "--cfg-options" in capsys.readouterr().err


def test_config_names():
    """Configs are found by path and among a package's packed ones; a misspelt one is answered with its neighbours."""
    assert cli.locate_config("mrla_mm::retinanet_r50_mrla_light_1x.py").endswith(
        ".mim/configs/retinanet_r50_mrla_light_1x.py"
    )
    assert "mask_rcnn_r50_mrla_light_1x.py" in error_of(cli.locate_config, "mrla_mm::mask_rcnn_r50_mrla_lihgt_1x.py")
    for name in ("nopackage", "os", "nowhere.at_all", ".relative"):
        assert f"no installed package '{name}'" in error_of(cli.locate_config, f"{name}::x.py")
    Path("notes.txt").write_text("no config")
    assert "no .py, .json or .yaml file" in error_of(cli.locate_config, "notes.txt")
    assert "nowhere/x.py does not exist" in error_of(cli.locate_config, "nowhere/x.py")


def test_only_near_configs_are_suggested():
    """A file that merely ends in .py is no suggestion; our configs are found from any folder, or their folder named."""
    Path("setup.py").write_text("")
    Path("my_detector.py").write_text("")
    assert error_of(cli.locate_config, "my_detektor.py").endswith("did you mean my_detector.py?")
    said = error_of(cli.locate_config, "configs/mask_rcnn_r50_mrla_light_1x.py")
    assert said.endswith("did you mean mrla_mm::mask_rcnn_r50_mrla_light_1x.py?")
    assert "did you mean mrla_mm::imagenet/resnet50_8xb32.py" in error_of(cli.locate_config, "mrla_mm::resnet50_8xb32")
    for name in ("nosuch.py", "mrla_mm::nosuch.py"):
        said = error_of(cli.locate_config, name)
        assert "did you mean" not in said and "mrla_mm/.mim/configs" in said and "mrla_mm::NAME.py" in said


@pytest.mark.parametrize("option", ["classes=a,b", "num_classes=2", "metainfo.classes=a,b"])
def test_classes_are_pointed_to_where_they_are_used(option):
    """Each data set's names, inside wrappers too, and each head's number are named; these overrides then work."""
    said = error_of(loaded, "--cfg-options", option)
    assert 'train_dataloader.dataset.metainfo.classes="[NAME,NAME]"' in said
    options = [each for each in said.split() if each.endswith(('"[NAME,NAME]"', "=NUMBER"))]
    assert len(options) == 4 and options[-1] == "model.bbox_head.num_classes=NUMBER"
    cfg = loaded("--cfg-options", *(each.replace('"', "").replace("NUMBER", "2") for each in options))
    assert cfg.val_dataloader.dataset.metainfo.classes == ["NAME", "NAME"] and cfg.model.bbox_head.num_classes == 2
    cfg.train_dataloader.dataset = dict(type="RepeatDataset", times=2, dataset=cfg.train_dataloader.dataset)
    assert "train_dataloader.dataset.dataset.metainfo.classes=" in error_of(check_option_keys, cfg, ["classes"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the refusal of --amp without a GPU")
def test_amp_needs_a_gpu():
    """--amp, or a config that asks for it, is refused before anything is built."""
    cfg = loaded()
    load_tool("train").enable_amp(cfg)
    assert cfg.optim_wrapper.type == "AmpOptimWrapper" and cfg.optim_wrapper.loss_scale == "dynamic"
    for kind in ("AmpOptimWrapper", AmpOptimWrapper, "mmengine.optim.AmpOptimWrapper"):  # as lazy configs name it
        cfg.optim_wrapper.type = kind
        said = error_of(cli.preflight, cfg, ("train",))
        assert "drop --amp" in said and "optim_wrapper.type=BFloat16OptimWrapper" in said


def test_amp_is_no_concern_of_a_test():
    """The saved config of a training with --amp is tested on a CPU; and one for tests alone has no optimizer."""
    free = [f"model.backbone.{option}" for option in ("init_cfg=None", "frozen_stages=-1", "norm_eval=False")]
    cfg = loaded("--cfg-options", *free)
    load_tool("train").enable_amp(cfg)
    cli.preflight(cfg, ())
    cfg.optim_wrapper = None
    cli.preflight(cfg, ())
    cli.check_amp_device(cfg)


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the refusal of GPU processes without a GPU")
def test_processes_need_gpus(monkeypatch):
    """More processes than GPUs are refused, unless gloo between them says that the CPU is meant."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = error_of(cli.preflight, loaded("--launcher", "pytorch"), ())
    assert "2 processes" in said and "0 GPUs" in said and "backend=gloo" in said
    cli.check_processes(loaded("--launcher", "pytorch", "--cfg-options", "env_cfg.dist_cfg.backend=gloo"))


def test_auto_scale_lr():
    """The switch needs the batch size the learning rate is meant for."""
    train, cfg = load_tool("train"), loaded("--cfg-options", "auto_scale_lr.enable=False")
    train.enable_auto_scale_lr(cfg)
    assert cfg.auto_scale_lr == dict(enable=True, base_batch_size=16)
    assert "auto_scale_lr.base_batch_size" in error_of(train.enable_auto_scale_lr, Config())


def save(path, age=0):
    torch.save(dict(meta={}), path)
    os.utime(path, (2e9 - age, 2e9 - age))
    return path


def test_resume_of_nothing_starts_from_scratch():
    """Automatic resuming without a checkpoint says so, and keeps the weights to start from."""
    cfg = loaded("--cfg-options", "load_from=start.pth")
    (said,) = load_tool("train").set_resume(cfg, "auto")
    assert "starts from scratch" in said
    assert cfg.resume is False and cfg.load_from == "start.pth"


def test_resume_takes_the_newest_whole_checkpoint(tmp_path):
    """The recorded checkpoint is taken if it is whole, else the newest whole one: a kill may tear or lose a file."""
    train, cfg = load_tool("train"), loaded("--work-dir", tmp_path)
    save(tmp_path / "epoch_1.pth", age=20), save(tmp_path / "epoch_2.pth", age=10)
    (tmp_path / "last_checkpoint").write_text(str(tmp_path / "epoch_1.pth"))
    train.set_resume(cfg, "auto")
    assert cfg.resume and cfg.load_from == str(tmp_path / "epoch_1.pth")
    whole = save(tmp_path / "epoch_3.pth").read_bytes()
    (tmp_path / "epoch_3.pth").write_bytes(whole[: len(whole) // 2])
    os.utime(tmp_path / "epoch_3.pth", (2e9, 2e9))
    (tmp_path / "last_checkpoint").write_text(str(tmp_path / "gone.pth"))
    save(tmp_path / "best_coco_bbox_mAP_epoch_3.pth")  # newest, but saved without the optimizer
    said = train.set_resume(cfg, "auto")
    assert cfg.load_from == str(tmp_path / "epoch_2.pth")
    assert [line for line in said if "epoch_3.pth is torn; left out" in line], said
    (tmp_path / "last_checkpoint").write_text("/where/this/folder/was/copied/from/epoch_1.pth")
    train.set_resume(cfg, "auto")
    assert cfg.load_from == str(tmp_path / "epoch_1.pth")
    (tmp_path / "last_checkpoint").write_bytes(b"\xff\xfe torn")
    train.set_resume(cfg, "auto")
    assert cfg.load_from == str(tmp_path / "epoch_2.pth")


def test_resume_from_a_named_checkpoint(tmp_path):
    """A named checkpoint is used, and must exist."""
    train, cfg = load_tool("train"), loaded()
    assert "gone.pth does not exist" in error_of(train.set_resume, cfg, "gone.pth")
    train.set_resume(cfg, str(save(tmp_path / "x.pth")))
    assert cfg.resume and cfg.load_from == str(tmp_path / "x.pth")
    assert parsed("--resume").resume == "auto" and parsed("--resume", "x").resume == "x" and parsed().resume is None


def test_resume_takes_whole_folders_of_fsdp(tmp_path, monkeypatch):
    """A folder is whole with a file of each process; one of more processes than there are is no choice."""
    train, cfg = load_tool("train"), loaded("--work-dir", tmp_path, "--launcher", "pytorch")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for epoch, ranks in ((1, 2), (2, 2), (3, 1)):
        (tmp_path / f"epoch_{epoch}.pth").mkdir()
        for rank in range(ranks):
            save(tmp_path / f"epoch_{epoch}.pth/rank{rank}.pth")
        os.utime(tmp_path / f"epoch_{epoch}.pth", (epoch, epoch))
    torn = tmp_path / "epoch_2.pth/rank1.pth"
    torn.write_bytes(torn.read_bytes()[:-30])
    said = train.set_resume(cfg, "auto")
    assert cfg.resume and cfg.load_from == str(tmp_path / "epoch_1.pth")
    for epoch in (2, 3):
        assert any(f"{tmp_path}/epoch_{epoch}.pth lacks files of 2 processes" in line for line in said)
    assert "lacks the file of a process" in error_of(train.set_resume, cfg, str(tmp_path / "epoch_3.pth"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "is of 2 processes, this run has 1" in error_of(train.set_resume, cfg, str(tmp_path / "epoch_1.pth"))
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", raising=False)
    check = functools.partial(check_location, str(tmp_path / "epoch_1.pth"), key="load_from", remedy="do without")
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" in error_of(check)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    check()
    (tmp_path / "epoch_1.pth/rank1.pth").write_bytes(b"")
    assert "rank1.pth are an empty file" in error_of(check)


def test_visualization_options():
    """--show and --show-dir set the keys of mmdet's hook, or of mmpretrain's in its scope."""
    test, cfg = load_tool("test"), loaded()
    test.enable_visualization(cfg, parsed("c.pth", "--show-dir", "vis", "--wait-time", 0.5, tool="test"))
    hook = cfg.default_hooks.visualization
    assert (hook.draw, hook.test_out_dir, hook.show, hook.wait_time) == (True, "vis", False, 0.5)
    cls = Config(dict(default_scope="mmpretrain", default_hooks=dict(visualization=dict(type="VisualizationHook"))))
    test.enable_visualization(cls, parsed("c.pth", "--show", "--show-dir", "vis", tool="test"))
    assert (cls.default_hooks.visualization.enable, cls.default_hooks.visualization.out_dir) == (True, "vis")
    assert "default_hooks.visualization" in error_of(test.enable_visualization, Config(), parsed("c", tool="test"))


def test_tta():
    """A config's own augmentation is used; a detector without gets the mirror image, a classifier is refused."""
    test, cfg = load_tool("test"), loaded()
    own = cfg.tta_pipeline
    test.enable_tta(cfg)
    assert cfg.model.type == "DetTTAModel" and cfg.model.module.type == "RetinaNet"
    assert cfg.test_dataloader.dataset.pipeline == own
    cfg = loaded()
    cfg.pop("tta_pipeline"), cfg.pop("tta_model")
    test.enable_tta(cfg)
    *steps, last = cfg.test_dataloader.dataset.pipeline
    assert [step["type"] for step in steps] == ["LoadImageFromFile", "Resize", "LoadAnnotations"]
    assert [flip["prob"] for flip in last["transforms"][0]] == [1.0, 0.0]
    cfg = Config(dict(default_scope="mmpretrain", test_dataloader=dict(dataset=dict(pipeline=[]))))
    assert "tta_model" in error_of(test.enable_tta, cfg)


def test_dump_file_must_be_a_pickle(capsys):
    """--out with another suffix ends in the usage message."""
    with pytest.raises(SystemExit):
        parsed("c.pth", "--out", "x.json", tool="test")
    assert "x.json must end in .pkl" in capsys.readouterr().err


def test_run_reports_input_errors_alone(capsys):
    """An InputError becomes one line and code 2, also out of a data loading worker; other errors pass."""
    from torch.utils.data import DataLoader

    class Broken:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise InputError(f"image {index}.jpg cannot be read")

    def from_worker(argv):
        list(DataLoader(Broken(), num_workers=1, collate_fn=default_collate))

    assert cli.run(from_worker) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1] == "error: image 0.jpg cannot be read"
    with pytest.raises(KeyError):
        cli.run(lambda argv: {}["x"])
    assert cli.run(lambda argv: None) == 0


@pytest.mark.parametrize(
    "options, expected",
    [
        (["model.backbone.layer_attention.type=MRLAHeavy"], "MRLAHeavy"),
        (["model.backbone.layer_attention.head_channels=48"], "48"),
        (["train_dataloader.dataset.ann_file=none.json"], "none.json does not exist"),
        (["model.bbox_head.num_classes=3"], "model.bbox_head.num_classes=80"),
        (["train_dataloader.batchsize=4"], "train_dataloader.batchsize: DataLoader has no argument 'batchsize'"),
        (["model.backbone.depth=18"], "set --cfg-options model.neck.in_channels=[64,128,256,512]"),
        (
            ["model.backbone.init_cfg.type=Pretrained", "model.backbone.init_cfg.checkpoint=w.pth"],
            "weights w.pth do not exist",
        ),
    ],
)
def test_failures_of_a_run(options, expected, coco_root, run_tool):
    """What is wrong with the model, the data or the weights ends the tool with one line before training starts."""
    options = [*tiny_options("retinanet", coco_root), *options]
    if options[-1].startswith("model.backbone.init_cfg"):
        options.remove("model.backbone.init_cfg=None")
    code, errors = run_tool("train", RETINANET, "--cfg-options", *options)
    last = errors.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and expected in last
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("checkpoint", ["test", RETINANET, "gone.pth"]),
        ("load_from", ["train", RETINANET, "--cfg-options", "load_from=gone.pth"]),
    ],
)
def test_a_wrong_checkpoint_is_named_before_the_data(name, argv, run_tool):
    """A test, or a fine-tuning, that has neither its checkpoint nor its data."""
    code, errors = run_tool(*argv)
    assert code == 2 and errors.splitlines()[-1].startswith(f"error: {name}: weights gone.pth do not exist")


def test_unreadable_image_ends_a_run(make_coco, run_tool):
    """With the hook, missing images end the run before training, and a cut-off one by its name during it."""
    root = make_coco(images=2)
    options = [*tiny_options("retinanet", root), "train_cfg.max_epochs=1"]
    cfg = Config.fromfile(RETINANET)
    cfg.custom_hooks = [dict(type="DatasetCheckHook")]
    cfg.dump("with_hook.py")
    image = root / "train2017/000001.jpg"
    image.write_bytes(image.read_bytes()[:-500])
    code, errors = run_tool("train", "with_hook.py", "--cfg-options", *options)
    assert code == 2 and f"error: image {image} cannot be read (the file is cut off)" in errors
    image.unlink()
    code, errors = run_tool("train", "with_hook.py", "--cfg-options", *options)
    assert code == 2 and "error: train data: 1 of 2 images" in errors and str(image) in errors


def test_hook_is_registered_at_the_root():
    """Configs of every scope find the hook by its bare name."""
    assert HOOKS.get("DatasetCheckHook") is DatasetCheckHook


def test_entry_point(capsys, monkeypatch):
    """`python -m mrla_mm` runs packed tools with the remaining arguments and lists them otherwise."""
    ran = []
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: ran.append((path, run_name, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["mrla_mm"])
    entry.main(["train", "config.py", "--amp"])
    (path, name, argv) = ran[0]
    assert path.endswith(".mim/tools/train.py") and name == "__main__" and argv == ["config.py", "--amp"]
    entry.main([])
    printed = capsys.readouterr().out
    assert "\n  train " in printed and "Train the model of a config\n" in printed
    users, developers = printed.split("for developers of mrla_mm: ")
    assert developers.strip().split(", ") == sorted(entry.DEVELOPER_TOOLS) and "torture" not in users
    assert error_of(entry.main, ["trian"]) == "unknown tool 'trian'; did you mean 'train'?"
    assert "did you mean 'get_flops'?" in error_of(entry.main, ["get-flops.py"])
    said = error_of(entry.main, ["xyz"])
    assert "there are: convert_weights, demo, " in said and "torture" not in said


@pytest.mark.parametrize("script, least", [("dist_train.sh", 2), ("dist_test.sh", 3), ("slurm_train.sh", 3)])
def test_scripts_say_their_usage(script, least):
    """Too few arguments end with the usage and code 2; the scripts are executable."""
    short = ["x"] * (least - 1)
    done = subprocess.run([ROOT / "tools" / script, *short], capture_output=True, text=True)
    assert done.returncode == 2 and f"{script} " in done.stderr and "PYTHON" in done.stderr


def test_slurm_script_calls_srun(tmp_path, monkeypatch):
    """The Slurm script hands its options to srun and the rest to train.py, from any folder."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GPUS": "4",
        "SRUN_ARGS": "--time 1:00 --quiet",
    }
    script = [ROOT / "tools/slurm_train.sh", "part", "job", "my config.py", "--amp"]
    said = subprocess.run(script, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()
    assert said[:8] == ["--partition", "part", "--job-name", "job", "--gres", "gpu:4", "--ntasks", "4"]
    rest = ["--time", "1:00", "--quiet", "python", "-u", str(ROOT / "tools/train.py"), "my config.py"]
    assert said[-10:] == [*rest, "--launcher", "slurm", "--amp"]


def test_ctrl_c_ends_a_tool_with_one_line(capsys):
    def stopped(argv):
        raise KeyboardInterrupt("the same command with --resume continues")

    assert cli.run(stopped) == 130
    assert capsys.readouterr().err == "interrupted: the same command with --resume continues\n"
