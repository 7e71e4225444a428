"""The complexity command: a model by module, and how a second one differs."""

import re

from mrla_mm import cli
from tests.conftest import load_tool

QUICKSTART = "mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py"


def flops(capsys, *argv):
    capsys.readouterr()
    assert cli.run(load_tool("get_flops").main, list(argv)) == 0
    written = capsys.readouterr()
    assert "warning" not in written.err
    rows = re.findall(r"^ *([-+\d,]*) +([-+.\d]+) G  (.+)$", written.out, re.MULTILINE)
    figures = {}
    for count, operations, name in rows:
        figures[name] = int((count or "0").replace(",", "")), float(operations)
    return figures


def test_a_detector_and_a_second_one(capsys):
    one = flops(capsys, QUICKSTART, "--shape", "64", "96")
    assert one["roi_head.mask_head"][1] > 0 and one["depthwise convolutions"][1] > 0
    first, second = (f"mrla_mm::imagenet/resnet50{name}_8xb32.py" for name in ("", "_mrla_light"))
    added = flops(capsys, first, "--compare", second, "--max-depth", "1")
    assert added["total"][0] == added["backbone"][0] == 25_738_452 - 25_557_032
    assert added["depthwise convolutions"][1] > 0
    assert "head" not in added, "only what differs is shown"
