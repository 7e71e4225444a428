"""The benchmark on networks small enough for seconds, and the short form of `make distributed`."""

import csv
import re

import pytest
import torch

import benchmark
from mrla_mm import cli
from tests.conftest import ROOT, run_python

SMALL = ["--depth", "18", "--size", "64", "64", "--batch-size", "2", "--rounds", "2"]


def test_the_benchmark_measures_models_and_variants_of_them(tmp_path):
    options = ["--models", "plain", "light", "--efficient-conv-bn-eval", *SMALL, "--device", "cpu"]
    assert cli.run(benchmark.main, [*options, "--out", str(tmp_path)]) == 0
    with (tmp_path / "report.csv").open() as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["plain", "plain, folded", "light", "light, folded"]
    assert float(rows["plain"]["time"]) == float(rows["plain"]["memory"]) == 1
    assert float(rows["light"]["MiB"]) > float(rows["plain"]["MiB"]) > 0
    assert all(float(row["step, ms"]) > 0 for row in rows.values())
    assert all(float(row["difference"]) < 1e-5 for row in rows.values())


def test_the_benchmark_times_no_model_that_is_wrong(tmp_path, monkeypatch):
    def miscompile(module, **options):
        module.register_forward_hook(lambda _, args, maps: [1.1 * level for level in maps])

    monkeypatch.setattr(torch.nn.Module, "compile", miscompile)
    out = tmp_path / "out"
    options = ["--models", "plain", "--compiled", *SMALL, "--device", "cpu", "--out", str(out)]
    assert cli.run(benchmark.main, options) == 2
    assert not out.exists()


@pytest.mark.slow
def test_distributed_gradients_equal_those_of_one_process():
    said = run_python(ROOT / ".dev_scripts/check_distributed.py", "--short")
    passed, of = map(int, re.search(r"(\d+) of (\d+) passed, 2 processes", said).groups())
    assert passed == of >= 20
