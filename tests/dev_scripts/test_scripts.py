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


@pytest.mark.parametrize("error", [0.0, 0.01, math.nan])
def test_the_benchmark_times_no_path_that_is_wrong(error, tmp_path, monkeypatch, capsys):
    def results(step):
        return torch.tensor([1.0 + (error if os.environ["MRLA_OPS"] == "fused" else 0.0)])

    monkeypatch.setenv("MRLA_OPS", "naive")  # the benchmark sets it; what was there comes back
    monkeypatch.setattr(steps, "results", results)
    small = "--paths naive fused --depth 18 --size 64 64 --batch-size 2 --rounds 1 --device cpu"
    code = cli.run(benchmark.main, ["backbone", "branch", *small.split(), "--out", str(tmp_path)])
    if error:
        assert code == 2 and not list(tmp_path.iterdir()) and "fused" in capsys.readouterr().err
        return
    rows, branch = json.loads((tmp_path / "report.json").read_text())["tables"].values()
    assert [row["path"] for row in rows] == ["plain", "plain, BN folded", "naive", "fused"]
    assert rows[0]["time ratio"] == rows[0]["memory ratio"] == 1
    assert rows[2]["MiB"] > rows[0]["MiB"] > 0 and all(row["ms"] > 0 for row in rows)
    assert len(branch) == 8 and all(0 < row["share of bandwidth"] < 2 for row in branch)


@pytest.mark.slow
def test_distributed_gradients_equal_those_of_one_process(tmp_path):
    run_python(ROOT / ".dev_scripts/check_distributed.py", "--short", "--out", tmp_path)
    report = json.loads((tmp_path / "distributed.json").read_text())
    assert report["processes"] == 2 and len(report["rows"]) >= 20
    assert all(row["error"] <= 1e-5 for row in report["rows"])
