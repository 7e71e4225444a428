"""The benchmark on networks small enough for seconds, and the short form of `make distributed`."""

import json
import math
import os

import pytest
import torch

import benchmark
import steps
from mrla_mm import cli
from tests.conftest import ROOT, run_python


@pytest.mark.parametrize("error", [0.01, math.nan])
def test_the_benchmark_times_no_path_that_is_wrong(error, tmp_path, monkeypatch, capsys):
    def results(step):
        return torch.tensor([1.0 + (error if os.environ["MRLA_OPS"] == "fused" else 0.0)])

    monkeypatch.setenv("MRLA_OPS", "naive")  # the benchmark sets it; what was there comes back
    monkeypatch.setattr(steps, "results", results)
    small = "backbone --depth 18 --size 64 64 --batch-size 2 --rounds 1 --device cpu --out"
    assert cli.run(benchmark.main, [*small.split(), str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir()) and "fused" in capsys.readouterr().err


@pytest.mark.slow
def test_distributed_gradients_equal_those_of_one_process(tmp_path):
    run_python(ROOT / ".dev_scripts/check_distributed.py", "--short", "--out", tmp_path)
    report = json.loads((tmp_path / "distributed.json").read_text())
    assert report["processes"] == 2 and len(report["rows"]) >= 20
    assert all(row["error"] <= 1e-5 for row in report["rows"])
