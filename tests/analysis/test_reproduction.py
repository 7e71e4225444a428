"""The reproduction guide names every row of the paper, its commands are runnable, and it shows what was recorded."""

import re
import shlex

import pytest
import torch
import yaml
from mmengine.registry import MODELS, init_default_scope

from mrla_mm.analysis import metafiles, reproduction, runs
from mrla_mm.analysis.paper_rows import ROWS
from mrla_mm.analysis.paper_tables import TABLES, find_row
from mrla_mm.errors import InputError
from mrla_mm.weights import layouts  # noqa: F401  registers what configs name

from ..conftest import ROOT, load_tool

CONFIGS = ROOT / "configs"
RUN = dict(
    model="ResNet-50 + light",
    run="resnet50/20260101_000000",
    date="2026-01-01",
    version="0.1.0",
    commit="0123456789ab",
    start=None,
    gpus=4,
    batch=256,
    amp=False,
    memory=12_345,
    figures={"accuracy/top1": 77.66, "accuracy/top5": 93.81},
)


@pytest.fixture(scope="module")
def configs():
    return {row.model: runs.row_config(row, CONFIGS) for row in ROWS}


def test_every_row_is_in_a_table_with_its_figures():
    assert {model for table in TABLES for model in table.models} == {row.model for row in ROWS}
    assert [table.number for table in TABLES] == [str(number) for number in range(1, 13)]
    for table in TABLES:
        for model in table.models:
            figures = find_row(model).figures
            assert table.metrics[0] in figures
            assert all(value is None or value > 15 for value in figures.values())


def test_no_two_rows_decide_the_same(configs):
    found = {}
    for model, cfg in configs.items():
        key = repr(sorted(runs.decisive(cfg).items(), key=lambda item: item[0]))
        assert key not in found, f"{model} and {found[key]}"
        found[key] = model


def test_epochs_of_the_commands_are_the_configs(configs):
    for row in ROWS:
        assert reproduction.epochs_of(row) == configs[row.model].train_cfg.max_epochs


@pytest.mark.parametrize("row", [row for row in ROWS if row.options], ids=lambda row: row.model)
def test_rows_with_options_build_and_have_the_papers_parameters(row, configs):
    cfg = configs[row.model]
    init_default_scope(cfg.default_scope)
    device = "meta" if cfg.model.backbone.type.startswith("MRLA") else "cpu"
    with torch.device(device):
        model = MODELS.build(cfg.model)
    if row.parameters is not None:
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(row.parameters, abs=0.06)


def words(command):
    return shlex.split(command.replace("\\\n", " "))


def test_commands_parse_and_start_from_what_another_row_trains():
    train = load_tool("train")
    names = [reproduction.run_name(row) for row in ROWS]
    assert len(set(names)) == len(names), "two rows would train into one folder"
    for row in ROWS:
        launcher, config, gpus, *rest = words(reproduction.command(row))
        assert (ROOT / launcher).is_file() and (ROOT / config).is_file() and gpus == "8"
        args = train.parse_args([config, *rest])
        assert (args.work_dir or f"work_dirs/{(ROOT / config).stem}") == f"work_dirs/{reproduction.run_name(row)}"
        start = args.cfg_options.pop("model.backbone.init_cfg.checkpoint", None)
        assert args.cfg_options == dict(row.options)
        assert (start is not None) == (row.is_detector and "+" in row.model)
        if start:
            assert start.split("/")[1] in names and start.endswith("epoch_100.pth")
    memory = words(reproduction.command(find_row("ResNet-101 + MLA"), images_per_gpu=64))
    assert memory[2] == "4" and {"model.backbone.depth=101", "train_dataloader.batch_size=64"} < set(memory)


def test_time_classes():
    assert reproduction.time_class(find_row("ResNet-50")) == "half a day"
    assert reproduction.time_class(find_row("ResNet-101 + light")) == "a day"
    assert reproduction.time_class(find_row("DeiT-B + light")) == "6 days"
    assert 6 < reproduction.hours(find_row("Faster R-CNN R50")) < 12


def test_cells_are_empty_until_measured_and_keep_every_run():
    empty = reproduction.tables_text([])
    assert all(line.split("|")[3].strip() == "" for line in empty.splitlines() if re.match(r"\| (?!model)", line))
    other = RUN | dict(run="again/20260102_000000", figures={"accuracy/top1": 77.0}, batch=32, gpus=1, amp=True)
    text = reproduction.tables_text([RUN, other])
    (line,) = {line for line in text.splitlines() if line.startswith("| ResNet-50 + light |") and "93.8" in line}
    assert line.split("|")[2:4] == [" 77.7 / 93.8 ", " 77.7 / 93.8 [1]<br>77.0 / – [2] "]
    assert "| ResNet-50 + light | 12,200 | 12,345 [1] | minutes |" in text, "memory is compared at 64 images only"
    assert "| ResNet-101 + MLA | out of memory |  | minutes |" in text
    listed = reproduction.runs_text([RUN, other])
    assert (
        "| [1] | `resnet50/20260101_000000` | 2026-01-01 | 0.1.0 0123456789 | random weights | 4 x 64, float32 |"
        in listed
    )
    assert "| 1 x 32, mixed |" in listed


def test_the_record_loses_nothing():
    assert reproduction.add_run([RUN], dict(RUN)) == [RUN]
    with pytest.raises(InputError, match="another figures"):
        reproduction.add_run([RUN], RUN | dict(figures={"accuracy/top1": 1.0}))
    memory_alone = RUN | dict(figures={})
    assert reproduction.add_run([memory_alone], RUN) == [RUN]
    assert reproduction.add_run([RUN], memory_alone) == [RUN]
    other = RUN | dict(run="other/20260102_000000")
    assert reproduction.add_run([RUN], other) == [RUN, other]


def test_what_lies_between_generated_parts_stays():
    page = "a\n<!-- generated: runs -->\nold\n<!-- end -->\nb [x]\n"
    filled = reproduction.fill(page, [])
    assert filled == "a\n<!-- generated: runs -->\n\nNone yet.\n\n<!-- end -->\nb [x]\n"
    assert reproduction.fill(filled, []) == filled


def test_metafiles_show_results_of_the_config_as_it_stands():
    assert metafiles.results_of("imagenet/resnet50_mrla_light_8xb32", []) == []
    (result,) = metafiles.results_of("imagenet/resnet50_mrla_light_8xb32", [RUN])
    assert result["Metrics"] == {"Top 1 Accuracy": 77.66, "Top 5 Accuracy": 93.81}
    changed = RUN | dict(model="ResNet-50 + light (f) d_k = 16")
    assert metafiles.results_of("imagenet/resnet50_mrla_light_8xb32", [changed]) == []


def test_files_of_the_checkout_follow_from_the_record(run_tool):
    """Every config has its entry, every entry its config, and page and metafiles are up to date."""
    code, errors = run_tool("collect_results", "--check", "--docs", ROOT / "docs")
    assert code == 0, errors
    index = yaml.safe_load((ROOT / "model-index.yml").read_text())
    models = [model for name in index["Import"] for model in yaml.safe_load((ROOT / name).read_text())["Models"]]
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.py") if path.parent.name != "_base_"}
    assert sorted(model["Config"] for model in models) == sorted(configs)
    assert len({model["Name"] for model in models}) == len(models)
    collections = {collection["Name"] for collection in index["Collections"]}
    assert {model["In Collection"] for model in models} <= collections
    assert (ROOT / "mrla_mm/.mim/model-index.yml").resolve() == ROOT / "model-index.yml"
