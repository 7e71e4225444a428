"""The report of a run: complete, self-contained, and readable by a browser with no network."""

import base64
import json
import os
import pickle
import re
import shutil
import subprocess

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm import cli
from mrla_mm.datasets.shapes import generate_shapes
from tests.conftest import ROOT, load_tool

CONFIG = "mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"
SECTIONS = [
    "Run", "Training curves", "AP by epoch", "Ground truth beside predictions", "AP and recall by size", "Classes",
    "Errors", "Precision and recall", "Confusion matrix",
]  # fmt: skip
REAL_COCO = ROOT.parent / "shared/data/coco_tiny"
RESULTS = ["--results", "{results}"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_logs(folder, epochs, scale=1.0):
    log = folder / "20260101_000000/vis_data/scalars.json"
    log.parent.mkdir(parents=True)
    records = []
    for epoch in range(1, epochs + 1):
        loss = scale * 3 / epoch
        records.append(
            dict(loss=loss, loss_cls=0.6 * loss, loss_bbox=0.4 * loss, lr=1e-3, time=0.5, epoch=epoch, step=epoch)
        )
        ap = 0.5 - 0.4 / epoch
        records.append({"coco/bbox_mAP": ap, "coco/bbox_mAP_50": ap + 0.2, "coco/segm_mAP": ap - 0.05, "step": epoch})
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = "2026/01/01 - mmengine - INFO -\nSystem environment:\n    Python: 3.11.7\n    PyTorch: 9.8.7\n"
    (log.parent.parent / "20260101_000000.log").write_text(text)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    """A run as the quick start leaves it, of a model with random weights that detects whatever it finds."""
    root = tmp_path_factory.mktemp("run")
    generate_shapes(root / "shapes", num_train=2, num_val=6, seed=0)
    cfg = Config.fromfile(cli.locate_config(CONFIG))
    cli.move_data_root(cfg, str(root / "shapes"))
    cfg.model.test_cfg.rcnn.update(score_thr=0.0, max_per_img=10)
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        cfg[name].update(num_workers=0, persistent_workers=False, batch_size=1)
    cfg.provenance = dict(version="0.0.1", commit="abc")  # as of the training
    train = root / "quickstart/train"
    write_logs(train, epochs=3)
    cfg.dump(train / "config.py")
    init_default_scope("mmdet")
    torch.manual_seed(0)
    meta = dict(epoch=3, iter=30)
    torch.save(dict(state_dict=MODELS.build(cfg.model).state_dict(), meta=meta), train / "epoch_3.pth")
    return root / "quickstart"


def perturbed_truth(truth):
    """Predictions: the ground truth, every third box moved, every fifth of the next class, scores from 0.9 to 0.4."""
    ids = [category["id"] for category in truth["categories"]]
    records = []
    for image in truth["images"]:
        own = [one for one in truth["annotations"] if one["image_id"] == image["id"] and not one["iscrowd"]]
        boxes, labels = [], []
        for one in own:
            x, y, w, h = one["bbox"]
            shift = 0.5 * w if one["id"] % 3 == 0 else 0
            boxes.append([x + shift, y, x + shift + w, y + h])
            labels.append((ids.index(one["category_id"]) + (one["id"] % 5 == 0)) % len(ids))
        instances = dict(bboxes=np.array(boxes), labels=np.array(labels), scores=np.linspace(0.9, 0.4, len(own)))
        records.append(dict(img_id=image["id"], pred_instances=instances))
    return records


@pytest.fixture(scope="module")
def results(work_dir):
    """Predictions of the validation images that no model made."""
    truth = json.loads((work_dir.parent / "shapes/annotations/instances_val2017.json").read_text())
    path = work_dir.parent / "predictions.pkl"
    path.write_bytes(pickle.dumps(perturbed_truth(truth)))
    return path


@pytest.fixture(scope="module")
def page(work_dir, results, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_logs(other, epochs=5, scale=2.0)
    out = tmp_path_factory.mktemp("page") / "report.html"
    arguments = [work_dir, "--results", results, "--out", out, "--images", 3, "--compare", other]
    load_tool("report").main([str(argument) for argument in arguments])
    return out


def section(text, name):
    """HTML of a section."""
    return re.search(rf"<h2>{name}</h2>(.*?)</section>", text, re.DOTALL)[1]


def numbers(html):
    """Cells of the rows of a table by the first cell."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    return {row[0]: row[1:] for row in cells if row}


def test_every_section_is_there(page):
    text = page.read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [*SECTIONS[:2], "Runs compared", *SECTIONS[2:]]
    facts = numbers(section(text, "Run"))
    assert facts["epochs"] == ["3 of 5"] and facts["PyTorch"] == ["9.8.7"] and facts["backbone"] == ["MRLAResNet 18"]
    assert facts["mrla_mm"] == ["0.0.1, commit abc"]
    assert facts["layer attention"] == ["MRLALight, head_channels=16"]
    assert int(facts["weights in it"][0].split()[0].replace(",", "")) > 1_000_000
    assert numbers(section(text, "AP by epoch"))["3"] == ["0.367", "0.567", "0.317"]
    assert [row[0] for row in numbers(section(text, "Runs compared")).values()] == ["3", "5"]
    errors = numbers(section(text, "Errors"))
    assert int(errors["localisation"][0]) > 0 and float(errors["classification"][1]) > 0
    assert set(numbers(section(text, "Classes"))) == {"circle", "rectangle", "triangle", "star", "ring", "cross"}


def test_the_page_needs_nothing_beside_it(page):
    text = page.read_text()
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]+)""", text)
    assert sources and all(source.startswith(("data:", "#s")) for source in sources)
    assert "<script" not in text and "@import" not in text
    pictures = re.findall(r'src="data:image/(png|jpeg);base64,([^"]+)"', text)
    assert len(pictures) == 5 + 3  # plots, gallery
    for _, data in pictures:
        picture = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
        assert min(picture.shape[:2]) > 200 and picture.std() > 5
    assert len(text) < 3_000_000


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine to open the report with")
def test_a_browser_shows_it_offline(page, tmp_path):
    picture = tmp_path / "screen.png"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--v=0", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1200,4000"]
    environment = dict(os.environ, HOME=str(tmp_path))
    done = subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    shown = cv2.imread(str(picture))
    assert shown.shape[:2] == (4000, 1200) and shown.std() > 20
    dumped = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=180, env=environment
    )
    assert re.findall(r"<h2>(.*?)</h2>", dumped.stdout) == re.findall(r"<h2>(.*?)</h2>", page.read_text())


@pytest.mark.slow
def test_predictions_are_made_and_kept(run_tool, work_dir, capsys):
    assert cli.run(load_tool("report").main, [str(work_dir), "--images", "1"]) == 0
    said = capsys.readouterr().out
    assert "predicting with" in said and "\n  [5/6]" in said.replace("[ ", "[") and " eta: 0:00:" in said
    report = work_dir / "train/report"
    made = (report / "predictions.pkl").stat().st_mtime
    detected = re.search(r">box</td><td>([\d.]+)</td>", (report / "report.html").read_text())
    assert 0 <= float(detected[1]) < 0.2, "random weights find next to nothing"
    code, err = run_tool("report", work_dir, "--images", 1)
    assert code == 0 and (report / "predictions.pkl").stat().st_mtime == made
    other = work_dir.parent / "other.pth"
    shutil.copy2(work_dir / "train/epoch_3.pth", other)
    code, err = run_tool("report", work_dir, "--images", 1, "--checkpoint", other)
    assert code == 0 and (report / "predictions.pkl").stat().st_mtime > made, "another checkpoint's are not its own"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "work directory nowhere does not exist"),
        (["{root}/shapes"], "holds no training log"),
        (["{root}/quickstart", "--images", "0"], "--images 0: give a positive number"),
        (["{root}/quickstart", "--score-thr", "2"], "--score-thr 2.0: give a number from 0 to 1"),
        (["{root}/quickstart", "--checkpoint", "none.pth"], "weights none.pth do not exist"),
        (["{root}/quickstart", "--results", "none.pkl"], "results file none.pkl does not exist"),
        (["{root}/quickstart", "--results", "{root}/empty.pkl"], "is neither of tools/test.py nor in COCO's"),
        (["{root}/quickstart", "--results", "{root}/braces.json"], "it holds a dict, not a list"),
        (["{root}/quickstart", "--results", "{results}", "--checkpoint", "{root}/empty.txt"], "are an empty file"),
        (["{root}/quickstart", "--results", "{results}", "--checkpoint", "{root}/text.pth"], "no PyTorch checkpoint"),
        (["{root}/quickstart", "--results", "{results}", "--out", "{root}"], "is a folder: give the name of a file"),
        (["{root}/quickstart", "--out", "{root}/text.pth/x.html"], "cannot be made a folder"),
        (["{root}/quickstart", "--cfg-options", "test_evaluator=None"], "no test_evaluator, without which nothing is"),
        (["{root}/quickstart", *RESULTS, "--cfg-options", "test_dataloader=None"], "the config has no test_dataloader"),
        (
            ["{root}/quickstart", *RESULTS, "--cfg-options", "test_dataloader.dataset.ann_file=no.json"],
            "test data: annotation file {root}/shapes/no.json does not exist",
        ),
        (
            ["{root}/quickstart", *RESULTS, "--cfg-options", "test_dataloader.dataset.type=mmpretrain.ImageNet"],
            "the test data set is a mmpretrain.ImageNet: the report knows COCO-format ones",
        ),
        (["{root}/quickstart", "--compare", "nowhere"], "work directory nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_said_before_any_work(run_tool, work_dir, results, arguments, message, monkeypatch):
    root = work_dir.parent
    for name, text in (("empty.pkl", ""), ("empty.txt", ""), ("braces.json", "{}"), ("text.pth", "epoch 12")):
        (root / name).write_text(text)
    monkeypatch.setattr("mrla_mm.analysis.report.detection_sections", None)
    code, err = run_tool("report", *(argument.format(root=root, results=results) for argument in arguments))
    assert code == 2 and message.format(root=root) in err


def test_a_work_directory_without_a_config_names_the_option(run_tool, tmp_path):
    write_logs(tmp_path / "run", epochs=1)
    code, err = run_tool("report", tmp_path / "run")
    assert code == 2 and "holds no config: give it with --config" in err


def test_a_run_that_diverged_and_images_that_are_gone(run_tool, work_dir, results, tmp_path):
    """The report is about what went wrong, too: losses that are no number, unreadable and missing images."""
    write_logs(tmp_path / "run", epochs=3)
    log = tmp_path / "run/20260101_000000/vis_data/scalars.json"
    text = re.sub(
        r'("loss": 1.5|"coco/bbox_mAP": 0.36)\d*', lambda found: found[1].split(":")[0] + ": NaN", log.read_text()
    )
    log.write_text(text + '{"lo')
    shapes = shutil.copytree(work_dir.parent / "shapes", tmp_path / "shapes")
    first, second, third, *_ = sorted((shapes / "val2017").iterdir())
    first.write_text("no image")
    second.unlink()
    cv2.imwrite(str(third), cv2.imread(str(third))[:20])
    arguments = ["--config", work_dir / "train/config.py", "--results", results, "--out", tmp_path / "report.html"]
    code, err = run_tool("report", tmp_path / "run", *arguments, "--cfg-options", f"data_root={shapes}")
    assert code == 0, err
    text = (tmp_path / "report.html").read_text()
    assert numbers(section(text, "Run"))["losses that are no number"] == ["1 of 3 in the log, first at iteration 2"]
    assert numbers(section(text, "Run"))["best box AP in training"] == ["0.300 (epoch 2)"]
    gallery = section(text, "Ground truth beside predictions")
    assert f"{first} is no image that can be read." in gallery and str(second) not in gallery
    assert f"{third} has another size than its annotations say." in gallery and "3 of 6 images" in gallery


@pytest.mark.skipif(not REAL_COCO.is_dir(), reason="no real COCO images at ../shared/data/coco_tiny")
def test_eighty_classes_on_real_images(run_tool, tmp_path):
    """The page holds for COCO's classes and images, crowds among them; no model is behind its figures."""
    truth = json.loads((REAL_COCO / "annotations/instances_val2017.json").read_text())
    (tmp_path / "predictions.pkl").write_bytes(pickle.dumps(perturbed_truth(truth)))
    write_logs(tmp_path / "run", epochs=3)
    config = cli.locate_config("mrla_mm::mask_rcnn_r50_mrla_light_1x.py")
    arguments = ["--config", config, "--results", tmp_path / "predictions.pkl", "--images", 2]
    code, err = run_tool("report", tmp_path / "run", *arguments, "--cfg-options", f"data_root={REAL_COCO}")
    assert code == 0, err
    text = (tmp_path / "run/report/report.html").read_text()
    classes = numbers(section(text, "Classes"))
    assert len(classes) == 80 and sum(int(row[0]) for row in classes.values()) == sum(
        not one["iscrowd"] for one in truth["annotations"]
    )
    errors = numbers(section(text, "Errors"))
    assert min(int(errors[kind][0]) for kind in ("classification", "localisation", "missed")) > 0
    assert "2 of 80 images" in section(text, "Ground truth beside predictions")
