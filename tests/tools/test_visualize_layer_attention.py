"""The command that draws layer-attention scores, on a quick-start model and generated pictures."""

import csv
from collections import defaultdict

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm.cli import locate_config

CONFIG = "mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"
BASE = "model.backbone.layer_attention.type=MRLABase"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    cfg = Config.fromfile(locate_config(CONFIG))
    cfg.model.backbone.layer_attention.type = "MRLABase"
    init_default_scope("mmdet")
    path = tmp_path_factory.mktemp("weights") / "base.pth"
    torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict()), path)
    return path


def test_pictures_and_scores_of_a_folder(run_tool, checkpoint, images, tmp_path):
    out = tmp_path / "out"
    code, err = run_tool(
        "visualize_layer_attention", CONFIG, checkpoint, images, "--out-dir", out, "--cfg-options", BASE
    )
    assert code == 0, err
    assert {path.name for path in out.iterdir()} == {
        "overview.png",
        *(f"stage{n}.png" for n in (1, 2, 3)),
        "scores.csv",
    }
    sums = defaultdict(float)
    for row in csv.DictReader((out / "scores.csv").open()):
        sums[row["stage"], row["head"], row["layer"]] += float(row["weight"])
    assert len(sums) == (2 + 4 + 8) * 2
    assert list(sums.values()) == pytest.approx([1] * len(sums), abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(checkpoint="nothing.pth"), "weights nothing.pth do not exist"),
        (dict(images="nowhere"), "input nowhere does not exist"),
        (dict(more=["--max-heads", "0"]), "--max-heads 0: give a positive number"),
        (dict(more=["--max-images", "1"]), "does not fit the model of"),
        (dict(config="mmdet::retinanet/retinanet_r50_fpn_1x_coco.py"), "does not fit the model of"),
    ],
)
def test_what_cannot_work(run_tool, checkpoint, images, tmp_path, change, message):
    more = change.get("more", [])
    arguments = [
        change.get("config", CONFIG),
        change.get("checkpoint", checkpoint),
        change.get("images", images),
        *more,
    ]
    code, err = run_tool("visualize_layer_attention", *arguments, "--out-dir", tmp_path / "out")
    assert code == 2 and message in err
