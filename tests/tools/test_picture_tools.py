"""The commands that draw what models see, each run as the documentation shows it, on small models and pictures."""

import csv

import cv2
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm.cli import locate_config
from tests.conftest import missing_torchcam

DETECTOR = "mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"
BASE = "model.backbone.layer_attention.type=MRLABase"
VIT = """
_base_ = "mrla_mm::imagenet/deit_tiny_mrla_light_8xb128.py"
model = dict(
    backbone=dict(
        _delete_=True, type="{kind}", arch=dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64),
        img_size=224, patch_size=16,
    ),
    head=dict(in_channels=32),
)
"""


def save_model(config, path, *, options=None):
    """Write the weights of a config's model as they start, from seed 0."""
    cfg = Config.fromfile(locate_config(str(config)))
    cfg.merge_from_dict(options or {})
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder with detector.pth, base.pth and, with a config each, mrla.pth and plain.pth of a small transformer."""
    folder = tmp_path_factory.mktemp("models")
    save_model(DETECTOR, folder / "detector.pth")
    save_model(DETECTOR, folder / "base.pth", options={"model.backbone.layer_attention.type": "MRLABase"})
    for name, kind in (("mrla", "MRLAViT"), ("plain", "ViT")):
        (folder / f"{name}.py").write_text(VIT.format(kind=kind))
        save_model(folder / f"{name}.py", folder / f"{name}.pth")
    return folder


def check_picture(path, least=150):
    picture = cv2.imread(str(path))
    assert min(picture.shape[:2]) > least and picture.std() > 10


def test_query_similarity(run_tool, models, images, tmp_path):
    out = tmp_path / "out"
    first = [DETECTOR, models / "base.pth", images, "--cfg-options", BASE]
    more = ["--compare", DETECTOR, models / "detector.pth", "--out-dir", out]
    code, err = run_tool("visualize_query_similarity", *first, *more)
    assert code == 0, err
    check_picture(out / "histograms.png")
    rows = list(csv.DictReader((out / "similarities.csv").open()))
    assert {row["model"].split(", ")[1] for row in rows} == {"base", "detector"}
    assert {row["images"] for row in rows} == {"2"} and len(rows) == 2 * (2 + 4 + 8)
    assert all(0 <= float(row["min"]) <= float(row["mean"]) <= float(row["max"]) <= 1 for row in rows)
    code, err = run_tool("visualize_query_similarity", DETECTOR, models / "detector.pth", images, "--skip-first")
    assert code == 2 and "no stage of the model has 3 layers" in err


def test_class_activation_maps(run_tool, models, images, tmp_path):
    if missing_torchcam():
        pytest.skip(missing_torchcam())
    out = tmp_path / "out"
    weak = ["--cfg-options", "model.test_cfg.rcnn.score_thr=0.0"]  # random weights detect nothing above 0.05
    arguments = [DETECTOR, models / "detector.pth", images, "--out-dir", out, "--max-channels", 4, *weak]
    code, err = run_tool("visualize_cam", *arguments, "--compare", DETECTOR, models / "detector.pth")
    assert code == 0, err
    assert {path.name for path in out.iterdir()} == {"a.png", "b.png"}
    check_picture(out / "a.png")
    code, err = run_tool("visualize_cam", *arguments[:-2], "--class", "unicorn")
    assert code == 2 and "--class unicorn: the model has no such class; they are circle, rectangle" in err
    transformer = [models / "mrla.py", models / "mrla.pth", images, "--out-dir", out, "--methods", "gradcam"]
    code, err = run_tool("visualize_cam", *transformer)
    assert code == 2 and "the stages of MRLAViT put out no maps to explain" in err
    code, err = run_tool("visualize_cam", *transformer, "--layers", "layers.0")
    assert code == 2 and "--layers layers.0 puts out (1, 197, 32), not a map" in err
    code, err = run_tool("visualize_cam", *transformer, "--layers", "patch_embed.projection", "--class", 1000)
    assert code == 2 and "--class 1000: the model has the classes 0 to 999" in err


def test_attention_of_a_transformer(run_tool, models, images, tmp_path):
    out = tmp_path / "out"
    first = [models / "mrla.py", models / "mrla.pth", images, "--patch", 3, 4, "--max-images", 1]
    compare = ["--compare", models / "plain.py", models / "plain.pth", "--out-dir", out]
    code, err = run_tool("visualize_vit_attention", *first, *compare)
    assert code == 0, err
    check_picture(out / "a.png")
    sums = {}
    for row in csv.DictReader((out / "attention.csv").open()):
        assert (row["query_row"], row["query_column"], row["layer"]) == ("3", "4", "4")
        key = row["model"], row["head"]
        sums[key] = sums.get(key, 0) + float(row["weight"])
    assert set(sums) == {("mrla", "1"), ("mrla", "2"), ("plain", "1"), ("plain", "2")}
    assert list(sums.values()) == pytest.approx([1] * 4, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--patch", "14", "0"], "patch 14 0 lies outside the 14 x 14 grid"),
        (["--pixel", "224", "0"], "--pixel 224 0 lies outside the picture the model sees, 224 x 224 pixels"),
        (["--layer", "5"], "layer 5: the model has layers 1 to 4"),
        (["--max-heads", "0"], "--max-heads 0: give a positive number"),
        (["--max-images", "0"], "--max-images 0: give a positive number"),
        (["--compare", DETECTOR, "{models}/detector.pth"], "MaskRCNN has no vision transformer"),
        (["--device", "nonsense"], "--device nonsense cannot be used here"),
        (["--cfg-options", "modle.type=None"], "nothing reads a key 'modle'"),
        (["--cfg-options", "test_dataloader=None"], "no test_dataloader.dataset.pipeline to prepare the images with"),
        (
            ["--cfg-options", "test_dataloader.dataset.pipeline.0.type=Load"],
            "dataset.pipeline cannot be built: 'Load is",
        ),
        (["--cfg-options", "test_dataloader.dataset.pipeline.3.type=Albu"], "cannot be built"),
    ],
)
def test_what_cannot_work(run_tool, models, images, tmp_path, arguments, message):
    given = [argument.format(models=models) for argument in arguments]
    first = [models / "mrla.py", models / "mrla.pth", images, "--out-dir", tmp_path / "out"]
    code, err = run_tool("visualize_vit_attention", *first, *given)
    assert code == 2 and message in err


def test_a_pixel_names_the_patch_it_lies_in(run_tool, models, images, tmp_path):
    first = [models / "mrla.py", models / "mrla.pth", images / "a.png", "--out-dir", tmp_path, "--pixel", 40, 17]
    code, err = run_tool("visualize_vit_attention", *first)
    assert code == 0, err
    row = next(csv.DictReader((tmp_path / "attention.csv").open()))
    assert (row["query_row"], row["query_column"]) == ("1", "2")


TOOLS = {
    "visualize_cam": "a.png",
    "visualize_layer_attention": "overview.png",
    "visualize_query_similarity": "histograms.png",
    "visualize_vit_attention": "attention.csv",
}


@pytest.fixture
def ask(run_tool, images, tmp_path, monkeypatch):
    """Return `ask(name, *argv)`, which runs a tool on a checkpoint that does not exist: it must not get that far."""

    def ask(name, *argv):
        if name == "visualize_cam" and missing_torchcam():
            pytest.skip(missing_torchcam())
        monkeypatch.chdir(tmp_path)
        return run_tool(name, DETECTOR, "no_checkpoint.pth", *argv)

    return ask


@pytest.mark.parametrize(("tool", "written"), TOOLS.items())
def test_input_images_are_never_replaced(tool, written, ask, images, tmp_path):
    """Neither where the results go by default, nor in the folder of the input, nor behind a link in another one."""
    default = tmp_path / "work_dirs" / tool.removeprefix("visualize_")
    default.mkdir(parents=True)
    (images / "a.png").rename(default / written.replace("csv", "png"))
    for given in ([default], [images, "--out-dir", f"{images}/../images"]):
        code, err = ask(tool, *given)
        assert code == 2 and "holds the input, which the results could replace: give another folder" in err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / written).symlink_to(images / "b.jpg")
    if tool != "visualize_cam":
        code, err = ask(tool, images, "--out-dir", tmp_path / "out")
        assert code == 2 and f"{written} there is an input image" in err


@pytest.mark.parametrize("tool", TOOLS)
def test_an_output_folder_that_is_a_file_is_said_before_any_work(tool, ask, images, tmp_path):
    (tmp_path / "file").touch()
    code, err = ask(tool, images, "--out-dir", tmp_path / "file")
    assert code == 2 and "cannot be made a folder (it is a file): give another one" in err


@pytest.mark.parametrize("broken", ["text", "cut off"])
def test_a_broken_image_is_named_before_any_work(broken, ask, images):
    content = b"no image" if broken == "text" else (images / "a.png").read_bytes()[:-200]
    (images / "a.png").write_bytes(content)
    reason = "no image that OpenCV reads" if broken == "text" else "the file is cut off"
    code, err = ask("visualize_layer_attention", images)
    assert code == 2 and f"image {images / 'a.png'} cannot be read ({reason})" in err


def test_an_image_that_the_pipeline_cannot_prepare_is_named(run_tool, models, images, tmp_path):
    cv2.imwrite(str(images / "a.png"), cv2.imread(str(images / "a.png"))[:1].repeat(60, 1))
    arguments = [DETECTOR, models / "detector.pth", images, "--out-dir", tmp_path / "out"]
    code, err = run_tool("visualize_layer_attention", *arguments)
    assert code == 2 and f"image {images / 'a.png'} cannot be prepared by the config's test pipeline" in err
