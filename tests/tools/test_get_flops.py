"""The complexity command: models by module, differences, the paper's tables, and what it refuses."""

import pytest

from mrla_mm import cli
from tests.conftest import load_tool

QUICKSTART = "mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"


@pytest.fixture
def flops(tmp_path, monkeypatch, capsys):
    """Return `flops(*argv)`, which runs the command in an empty folder: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        capsys.readouterr()
        code = cli.run(load_tool("get_flops").main, list(argv))
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


def test_a_detector_by_module_and_a_second_one(flops):
    code, out, err = flops(QUICKSTART, "--shape", "64", "96")
    assert code == 0 and "warning" not in err
    assert "every multiply-add and every elementwise product" in out and "image: 96 x 64" in out
    assert "| roi_head.mask_head |" in out and "| depthwise convolutions |" in out
    code, out, _ = flops(
        QUICKSTART, "--shape", "64", "96", "--compare", "mrla_mm::faster_rcnn_r50_mrla_base_1x.py", "--max-depth", "1"
    )
    assert code == 0 and "| backbone | +" in out and "second minus first" in out


def test_options_reach_the_model(flops):
    wide = flops(QUICKSTART, "--shape", "64", "64", "--cfg-options", "model.roi_head.mask_head.num_convs=4")[1]
    assert wide != flops(QUICKSTART, "--shape", "64", "64")[1]


def test_models_of_the_papers_tables(flops, tmp_path):
    code, out, _ = flops("--paper", "--only", "resnet-50 + mla")
    assert code == 0
    row = next(line for line in out.splitlines() if "ResNet-50 + MLA" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:7] == ["4", "ResNet-50 + MLA", "25.72", "25.7", "+0.02", "4.243", "4.8"]
    assert cells[-2:] == ["+0.142", "+0.7"]
    assert (tmp_path / "work_dirs/complexity/paper.md").read_text() in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a CONFIG, or one of"),
        ([QUICKSTART, "--depth"], "give a CONFIG, or one of"),
        ([QUICKSTART, "--only", "x"], "--only chooses among"),
        (["--paper", "--only", "ConvNeXt"], "no model of the paper's tables"),
        ([QUICKSTART, "--shape", "0", "8"], "positive height and width"),
        (["nowhere.py"], "nowhere.py does not exist"),
        ([QUICKSTART, "--max-depth", "-1"], "--max-depth -1: give 0"),
        ([QUICKSTART, "--cfg-options", "modle.type=1"], "nothing reads a key 'modle'; did you mean 'model'?"),
        ([QUICKSTART, "--cfg-options", "model.backbone.type=Bone"], "cannot be built: KeyError"),
        (["--depth", "--compare", QUICKSTART], "--compare needs a CONFIG"),
        (["--depth", "--out-dir", __file__], "cannot be made a folder (it is a file)"),
    ],
)
def test_what_cannot_work(flops, argv, message):
    code, _, err = flops(*argv)
    assert code == 2 and message in err
