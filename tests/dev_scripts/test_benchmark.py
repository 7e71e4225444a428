"""The benchmark end to end, on networks small enough for seconds."""

import json
import math
import os

import pytest
import torch

import benchmark
import steps
from mrla_mm import cli


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MRLA_OPS", "naive")  # the benchmark sets it; what was there comes back

    small = ["--size", "64", "64", "--batch-size", "2", "--rounds", "1", "--device", "cpu"]
    report = tmp_path / "report.json"

    def call(*argv):
        code = cli.run(benchmark.main, [*argv, *small, "--out", str(tmp_path)])
        tables = json.loads(report.read_text())["tables"] if report.exists() else None
        return code, capsys.readouterr().err, tables

    return call


def test_paths_of_a_backbone(bench):
    code, err, tables = bench("backbone", "branch", "--depth", "18", "--attention", "light")
    assert not code, err
    rows, branch = tables.values()
    assert [row["path"] for row in rows] == ["plain", "plain, BN folded", "naive", "fused"]
    assert rows[0]["time ratio"] == rows[0]["memory ratio"] == 1
    assert rows[2]["MiB"] > rows[0]["MiB"] > 0 and all(row["ms"] > 0 for row in rows)
    assert len(branch) == 8 and all(0 < row["share of bandwidth"] < 2 for row in branch)


@pytest.mark.parametrize("error", [0.01, math.nan])
def test_a_wrong_path_is_not_timed(error, bench, monkeypatch):
    def wrong(_):
        return torch.tensor([1.0 + (error if os.environ["MRLA_OPS"] == "fused" else 0.0)])

    monkeypatch.setattr(steps, "results", wrong)
    code, err, tables = bench("backbone", "--depth", "18", "--paths", "fused")
    assert code == 2 and tables is None and "fused" in err
