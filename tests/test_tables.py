"""The tables of docs: counted again, listed where they differ from the paper's, quoted as it is."""

import csv
import re
from pathlib import Path

import mmdet
import pytest
import yaml

from .conftest import ROOT
from .test_configs import ENTRIES

model_zoo = pytest.importorskip("model_zoo", reason="needs .dev_scripts of a checkout")
paper_tables = pytest.importorskip("paper_tables")
ROWS = paper_tables.read_rows()


PAGE = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
COUNTED = {
    "imagenet.csv": (
        "resnet50_mrla_light_8xb32",
        "resnet50_mla_8xb32",
        "efficientnet_b0_mrla_base_8xb96",
        "deit_tiny_mrla_light_8xb128",
        "ceit_tiny_mrla_light_8xb128",
        "pvtv2_b0_mrla_light_8xb128",
    ),
    "coco.csv": (
        "comparators/faster_rcnn_r50_dla_light_1x",
        "retinanet_r50_mrla_base_1x",
        "mask_rcnn_r50_1x",
        "mask_rcnn_r50_mrla_light_1x",
    ),
}


def read_ap():
    with (ROOT / "docs/tables/coco_ap.csv").open(encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return {row[0]: row[1:] for row in rows}


def metrics_of_mmdet(name):
    """What mmdet's metafiles say of a config."""
    folder = name.partition("_")[0].replace("-", "_")
    folder = next((each for each in ("pvt", "swin") if each in name), folder)
    metafile = Path(mmdet.__file__).parent / f".mim/configs/{folder}/metafile.yml"
    models = {model["Name"]: model for model in yaml.safe_load(metafile.read_text())["Models"]}
    results = [result["Metrics"] for result in models[name]["Results"]]
    return {metric: value for each in results for metric, value in each.items()}


def ap_of_mmdet(detector, depth, metric):
    """What mmdet's metafile says of its 1x config."""
    name = detector.lower().replace("-", "").replace(" ", "-")
    return metrics_of_mmdet(f"{name}_r{depth}_fpn_1x_coco")[metric]


def quoted_from_the_paper():
    """Box and mask AP, or top-1 accuracy, by config."""
    quoted = {}
    for row in ROWS["coco.csv"]:
        if row.table and row.config and not row.options:
            ap = read_ap()[row.model]
            quoted[row.config] = [float(each) for each in (ap[0], ap[6]) if each]
    for cells in paper_tables.read_table("imagenet.csv")[1]:
        if cells[2] and not cells[3] and cells[paper_tables.WIDTH]:
            quoted[f"imagenet/{cells[2]}"] = [float(cells[paper_tables.WIDTH])]
    return quoted


def test_the_metafiles_quote_the_paper_and_mmdet():
    quoted = {name: ap for name, ap in quoted_from_the_paper().items() if "::" not in name}
    for name, entry in ENTRIES.items():
        metadata = entry["Metadata"]
        assert [*metadata.get("Paper", {}).values()] == quoted.pop(name, []), name
        plain = dict(metadata.get("Plain of mmdet", {}))
        if plain:
            assert metrics_of_mmdet(plain.pop("Name")) == plain
    assert not quoted


def test_the_model_zoo_has_a_row_for_each_config():
    page = model_zoo.PAGE.read_text(encoding="utf-8")
    assert page == model_zoo.filled_in(page), "run .dev_scripts/model_zoo.py"
    assert sorted(re.findall(r"^\| `([\w/]+)` \|", page, re.M)) == sorted(ENTRIES)


def test_the_readme_quotes_the_metafiles():
    """Parameters, box AP of the paper's plain and light, and mmdet's, of three detectors."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) → (.+?) \| (.+?) \|", readme, re.M)
    assert len(rows) == 3
    for name, *cells in rows:
        light = ENTRIES[name]["Metadata"]
        plain = ENTRIES[name.replace("_mrla_light", "")]["Metadata"]
        quoted = [each["box AP"] for each in (plain["Paper"], light["Paper"])]
        quoted = [light["Parameters"] / 1e6, *quoted, light["Plain of mmdet"]["box AP"]]
        assert [float(cell) for cell in cells] == pytest.approx(quoted, abs=0.005)


def listed(rows):
    return {(row[0], row[1]): row[2:] for row in paper_tables.differences(rows)}


def test_the_list_of_differences_is_that_of_the_tables():
    with (ROOT / "docs/tables/differences.csv").open(encoding="utf-8") as file:
        _, *found = csv.reader(file)
    assert found == paper_tables.all_differences()


def test_a_value_is_listed_if_it_rounds_to_another_than_the_papers():
    blank = paper_tables.Row("1", "", "", "", "", "", "", "")
    rows = [
        blank._replace(model="agrees", parameters="5.7", our_parameters="5.7498"),
        blank._replace(model="differs", parameters="5.7", our_parameters="5.7501"),
        blank._replace(model="coarse", operations="318", our_operations="316.8150"),
        blank._replace(model="unknown", our_parameters="5.7", operations="1.2"),
        blank._replace(model="Mask R-CNN R50", operations="275.58", our_operations="259.5430"),
        blank._replace(model="Mask R-CNN R50 + X", operations="276.93", our_operations="260.8950"),
        blank._replace(model="Mask R-CNN R50 + Y", operations="279.60", our_operations="259.6730"),
    ]
    assert listed(rows) == {
        ("differs", "parameters, M"): ["5.7", "5.7501", "+0.0501"],
        ("coarse", "multiply-adds, G"): ["318", "316.8150", "-1.1850"],
        ("Mask R-CNN R50 + Y", "multiply-adds over plain, G"): ["4.02", "0.1300", "-3.8900"],
    }


def test_every_detector_of_the_paper_has_its_average_precision():
    assert [*read_ap()] == [row.model for row in ROWS["coco.csv"] if row.table]


def test_the_gains_beside_mmdets_baselines():
    """Plain of the paper and of mmdet, light of the paper, its gain over both."""
    rows = re.findall(r"^\| ([A-Z][\w -]+) R(\d+)(, \w+)? ((?:\| [\d.]+ ){5})\|$", PAGE, re.M)
    assert len(rows) == 8
    ap = read_ap()
    for detector, depth, task, cells in rows:
        column, metric = (6, "mask AP") if task == ", masks" else (0, "box AP")
        plain = float(ap[f"{detector} R{depth}"][column])
        light = float(ap[f"{detector} R{depth} + MRLA-light"][column])
        theirs = ap_of_mmdet(detector, depth, metric)
        expected = [plain, theirs, light, light - plain, light - theirs]
        assert [float(cell) for cell in cells.strip("| ").split(" | ")] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("table", COUNTED)
def test_rows_are_counted_again(table):
    """A row of each family and detector; .dev_scripts/paper_tables.py counts them all."""
    rows = [row for row in ROWS[table] if row.config in COUNTED[table] and not row.options]
    assert len(rows) == len(COUNTED[table])
    for row in rows:
        counted = paper_tables.count(row, paper_tables.FOLDERS[table])
        assert counted == (row.our_parameters, row.our_operations)
