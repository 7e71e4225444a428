"""What a real run measured is recorded once; what is no complete run of one row is refused with its reason."""

import json
import shutil

import pytest
from mmengine.config import DictAction

from mrla_mm import cli
from mrla_mm.analysis.paper_rows import BOX, DETECTION_SHAPE, PaperRow

from ..conftest import ROOT, forget_runs, load_tool, tiny_options

NAME = "retinanet_r50_mrla_light_1x"
PAGE = "<!-- generated: tables -->\n<!-- end -->\n<!-- generated: runs -->\n<!-- end -->\n"


@pytest.fixture(scope="module")
def options(coco_root):
    return tiny_options(NAME, coco_root, "train_cfg.max_epochs=1", "train_dataloader.dataset.indices=4")


@pytest.fixture(scope="module")
def row(options):
    pairs = dict(option.split("=", 1) for option in options if not option.startswith("data_root"))
    values = {key: DictAction._parse_iterable(value) for key, value in pairs.items()}
    return PaperRow("RetinaNet R50 + light", NAME, 1.0, None, DETECTION_SHAPE, values, {"coco/bbox_mAP": 39.6})


@pytest.fixture(scope="module")
def trained(options, tmp_path_factory):
    """Work directory of one real epoch on four images."""
    work_dir = tmp_path_factory.mktemp("work_dirs") / "mine"
    forget_runs()
    argv = [str(ROOT / f"configs/{NAME}.py"), "--work-dir", str(work_dir), "--cfg-options", *options]
    assert cli.run(load_tool("train").main, argv) == 0
    return work_dir


@pytest.fixture
def work_dir(trained, tmp_path):
    """A copy of the run, free to be broken, its checkpoints left behind."""
    return shutil.copytree(trained, tmp_path / "mine", ignore=shutil.ignore_patterns("*.pth"))


@pytest.fixture
def collect(tmp_path, row, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "reproduce.md").write_text(PAGE)

    def run(*argv, rows=(row,), images=4):
        tool = load_tool("collect_results")
        code = cli.run(lambda argv: tool.main(argv, rows, images), [*map(str, argv), "--docs", str(docs)])
        return code, capsys.readouterr(), docs

    return run


def scalars_of(work_dir):
    (path,) = work_dir.glob("*/vis_data/scalars.json")
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_recorded_once_and_fills_the_page(collect, work_dir):
    code, _, docs = collect(work_dir)
    assert code == 0
    (run,) = json.loads((docs / "measured.json").read_text())["runs"]
    logged = scalars_of(work_dir)[1][-1]
    assert {key: run["figures"][key] for key in BOX} == {key: round(100 * logged[key], 2) for key in BOX}
    assert (run["model"], run["gpus"], run["batch"], run["amp"]) == ("RetinaNet R50 + light", 1, 2, False)
    assert run["run"] == f"mine/{next(work_dir.glob('2*')).name}" and run["version"] and run["start"] is None
    page = (docs / "reproduce.md").read_text()
    assert f"`{run['run']}`" in page
    line = next(line for line in page.splitlines() if line.startswith("| RetinaNet R50 + light |"))
    assert line.split("|")[3].strip().startswith(f"{run['figures'][BOX[0]]:.1f} / ")
    assert line.split("|")[2].strip() == "39.6 / 59.7 / 42.4 / 24.1 / 43.6 / 51.2", "the paper's own figures stay"

    before = {path.name: path.read_bytes() for path in docs.iterdir()}
    code, printed, _ = collect(work_dir)
    assert code == 0 and "written" not in printed.out
    assert {path.name: path.read_bytes() for path in docs.iterdir()} == before


@pytest.fixture(
    params=[
        "incomplete",
        "ambiguous",
        "tests only",
        "no log",
        "not a run",
        "nothing evaluated",
        "cut",
        "damaged config",
    ]
)
def broken(request, work_dir):
    """A work directory that must be refused, and why."""
    (folder,) = work_dir.glob("2*")
    path, lines = scalars_of(work_dir)
    match request.param:
        case "incomplete":
            path.write_text("".join(json.dumps(line) + "\n" for line in lines if "loss" in line))
            return "incomplete: the run logged training up to epoch 1 of 1 and no figures"
        case "ambiguous":
            shutil.copytree(folder, work_dir / "20990101_000000")
            copy = work_dir / "20990101_000000/vis_data/scalars.json"
            copy.write_text(copy.read_text().replace('"coco/bbox_mAP": ', '"coco/bbox_mAP": 1'))
            return "ambiguous: the folder holds different figures of epoch 1"
        case "tests only":
            path.unlink()
            return "holds no training, only tests"
        case "no log":
            next(folder.glob("*.log")).unlink()
            return "no complete .log file"
        case "not a run":
            shutil.rmtree(folder)
            return "holds no run"
        case "nothing evaluated":
            lines[-1]["coco/bbox_mAP"] = -1.0
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return "an AP of -1"
        case "cut":
            path.write_text(path.read_text()[:-20])  # the figures of the last epoch are in the torn line
            return "incomplete: the run logged training up to epoch 1 of 1 and no figures"
        case "damaged config":
            (folder / "vis_data/config.py").write_text("model = dict(")
            return "config.py, line 1: SyntaxError: '(' was never closed"


def test_what_is_no_measurement_is_refused(broken, collect, work_dir):
    code, printed, docs = collect(work_dir)
    assert code == 2 and broken in printed.err
    assert not (docs / "measured.json").exists()


def test_another_config_and_a_smaller_data_set_are_refused(collect, work_dir, row):
    code, printed, _ = collect(work_dir, rows=(row._replace(options=row.options | {"model.backbone.depth": 34}),))
    assert code == 2 and "nearest is 'RetinaNet R50 + light', but model.backbone.depth is 18, not 34" in printed.err
    code, printed, _ = collect(work_dir, images=None)
    assert code == 2 and "had 4 images and that of the paper's has 117,266" in printed.err
    code, printed, _ = collect(work_dir, rows=(row, row._replace(model="its twin")))
    assert code == 2 and "fits several rows: RetinaNet R50 + light, its twin" in printed.err


def test_good_runs_are_recorded_beside_refused_ones(collect, work_dir, tmp_path):
    code, printed, docs = collect(work_dir, tmp_path / "nowhere")
    assert code == 2 and "nowhere does not exist" in printed.err
    assert len(json.loads((docs / "measured.json").read_text())["runs"]) == 1


def test_memory_of_a_run_that_did_not_end(collect, work_dir):
    code, printed, _ = collect("--memory", work_dir)
    assert code == 2 and "logged no GPU memory" in printed.err
    path, lines = scalars_of(work_dir)
    path.write_text("".join(json.dumps(line | {"memory": 1234}) + "\n" for line in lines if "loss" in line))
    code, _, docs = collect("--memory", work_dir)
    (run,) = json.loads((docs / "measured.json").read_text())["runs"]
    assert code == 0 and run["memory"] == 1234 and run["figures"] == {}


def test_a_record_that_is_none_is_not_overwritten(collect, tmp_path):
    (tmp_path / "docs/measured.json").write_text("[1")
    code, printed, docs = collect()
    assert code == 2 and "measured.json is no record of runs" in printed.err
    assert (docs / "measured.json").read_text() == "[1"


def test_docs_that_are_a_file(run_tool, tmp_path):
    (tmp_path / "file").touch()
    code, err = run_tool("collect_results", "--docs", tmp_path / "file")
    assert code == 2 and "--docs" in err and "it is a file" in err
