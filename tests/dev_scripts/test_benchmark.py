"""The benchmark end to end, on networks small enough for seconds."""

import json
import os
from argparse import Namespace

import pytest
import torch
from torch import nn

import benchmark
import steps
from mrla_mm import cli


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Return `bench(*argv)`: exit code, stderr and the tables of the report."""
    monkeypatch.delenv("MRLA_OPS", raising=False)

    def call(*argv):
        small = ["--size", "64", "64", "--batch-size", "2", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
        code = cli.run(benchmark.main, [*argv, *small])
        report = tmp_path / "report.json"
        return code, capsys.readouterr().err, json.loads(report.read_text())["tables"] if report.exists() else None

    return call


def test_paths_of_a_backbone(bench):
    code, err, tables = bench("backbone", "branch", "--depth", "18", "--attention", "light")
    assert not code, err
    rows, branch = tables.values()
    assert [row["path"] for row in rows] == ["plain", "plain, BN folded", "naive", "fused"]
    assert rows[0]["time ratio"] == rows[0]["memory ratio"] == 1
    assert rows[2]["MiB"] > rows[0]["MiB"] > 0 and all(row["ms"] > 0 for row in rows)
    assert len(branch) == 8 and all(0 < row["share of bandwidth"] < 2 for row in branch)
    assert "MRLA_OPS" not in os.environ


def test_a_wrong_path_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(steps, "results", lambda _: torch.tensor([1.0 + (os.environ["MRLA_OPS"] == "fused")]))
    code, err, tables = bench("backbone", "--depth", "18", "--paths", "fused")
    assert code == 2 and tables is None and "fused" in err


@pytest.mark.parametrize("argv", [["speed"], ["detector"], ["detector", "--config", "configs/retinanet_r50_1x.py"]])
def test_refusals(bench, argv):
    assert bench(*argv)[0] == 2


def test_steps_in_half_precision_scale_their_loss(monkeypatch):
    """Gradients that underflow in float16 are found all the same, as in a training with a loss scale."""
    monkeypatch.setattr(steps.Step, "amp_dtype", torch.float16)
    common = dict(device=torch.device("cpu"), batch_size=1, size=(8, 8))
    found = {}
    for amp in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.Flatten(0))
        step = steps.Step(model, Namespace(amp=amp, **common))
        step.call = lambda images, model=model: [1e-3 * model(images)]
        step()
        (found[amp],) = (parameter.grad for parameter in model.parameters())
    torch.testing.assert_close(found[True] / steps.HALF_LOSS_SCALE, found[False], rtol=1e-2, atol=1e-9)
