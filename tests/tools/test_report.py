"""The report of a run: complete, self-contained, and readable without a network."""

import base64
import json
import re

import cv2
import numpy as np
import pytest
import torch

from mrla_mm.config import read_config
from mrla_mm.datasets import generate_shapes
from mrla_mm.inference import build_model

CONFIG = "mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"
CLASSES = {"circle", "rectangle", "triangle", "star", "ring", "cross"}


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    """A run as the quick start leaves it, of a model with random weights that detects whatever it finds."""
    root = tmp_path_factory.mktemp("run")
    generate_shapes(root / "shapes", num_train=2, num_val=3)
    cfg = read_config(CONFIG, dict(data_root=str(root / "shapes")))
    cfg.model.test_cfg.rcnn.update(score_thr=0.0, max_per_img=10)
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        cfg[name].update(num_workers=0, persistent_workers=False, batch_size=1)
    train = root / "quickstart/train"
    log = train / "20260101_000000/vis_data/scalars.json"
    log.parent.mkdir(parents=True)
    records = []
    for epoch in (1, 2, 3):
        loss = float("nan") if epoch == 2 else 3 / epoch
        records.append(
            dict(loss=loss, loss_cls=loss / 2, lr=1e-3, time=0.5, epoch=epoch, step=epoch)
        )
        ap = 0.5 - 0.3 / epoch
        records.append(
            {
                "coco/bbox_mAP": ap,
                "coco/segm_mAP": ap / 2,
                "coco/star_precision": 0.25,
                "step": epoch,
            }
        )
    log.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"lo')
    cfg.dump(train / "config.py")
    torch.manual_seed(0)
    torch.save(
        dict(state_dict=build_model(cfg).state_dict(), meta=dict(epoch=3, iter=30)),
        train / "epoch_3.pth",
    )
    return root / "quickstart"


def table(text, name):
    """Cells of the rows of a section's table by the first cell."""
    section = re.search(rf"<h2>{name}</h2>(.*?)</section>", text, re.DOTALL)[1]
    rows = [
        re.findall(r"<td>(.*?)</td>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    ]
    return {row[0]: row[1:] for row in rows if row}


def test_the_page_is_complete_and_needs_nothing_beside_it(run_tool, work_dir):
    code, err = run_tool("report", work_dir, "--images", 2)
    assert code == 0, err
    text = (work_dir / "train/report/report.html").read_text()
    facts = table(text, "Run")
    assert facts["epochs"][0].startswith("3 of") and facts["backbone"] == ["MRLAResNet 18"]
    assert (
        "MRLALight" in facts["layer attention"][0]
        and "1, " in facts["losses that are not finite"][0]
    )
    assert table(text, "AP by epoch")["3"] == ["0.400", "0.200"]
    assert set(table(text, "AP by class")) == CLASSES
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]+)""", text)
    assert sources and all(source.startswith(("data:", "#s")) for source in sources)
    assert "<script" not in text and "@import" not in text
    pictures = re.findall(r'src="data:image/(?:png|jpeg);base64,([^"]+)"', text)
    assert len(pictures) == 1 + 2  # curves, gallery
    for data in pictures:
        picture = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
        assert min(picture.shape[:2]) > 200 and picture.std() > 5


def test_without_an_evaluation_classes_are_those_of_the_log(run_tool, work_dir, tmp_path):
    out = tmp_path / "new/report.html"
    code, err = run_tool("report", work_dir / "train", "--no-eval", "--images", 1, "--out", out)
    assert code == 0, err
    assert table(out.read_text(), "AP by class") == {"star": ["0.250"]}


def test_what_is_missing_is_named(run_tool, tmp_path, work_dir):
    code, err = run_tool("report", tmp_path)
    assert code == 2 and "scalars.json" in err
    (tmp_path / "20260101_000000/vis_data").mkdir(parents=True)
    (tmp_path / "20260101_000000/vis_data/scalars.json").write_text('{"loss": 1, "step": 1}\n')
    code, err = run_tool("report", tmp_path, "--config", work_dir / "train/config.py")
    assert code == 2 and "--checkpoint" in err
