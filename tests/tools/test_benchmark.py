"""The benchmark tool end to end, on networks small enough for seconds."""

import json
import os
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from mrla_mm.analysis import benchmark, steps
from mrla_mm.ops import reference


@pytest.fixture
def bench(run_tool, tmp_path, monkeypatch):
    """Return `bench(*argv)`: exit code, stderr and the tables of the report."""
    monkeypatch.delenv("MRLA_OPS", raising=False)

    def call(*argv):
        small = ["--size", "64", "64", "--batch-size", "2", "--rounds", "1", "--device", "cpu", "--out", tmp_path]
        code, err = run_tool("benchmark", *argv, *small)
        report = tmp_path / "report.json"
        return code, err, json.loads(report.read_text())["tables"] if report.exists() else None

    return call


def test_paths_of_a_backbone(bench):
    code, err, tables = bench("models", "--depth", "18", "--attention", "base", "--norm", "batch")
    assert not code, err
    rows = tables["train, eager"]
    assert [row["path"] for row in rows] == ["plain", "straightforward", "reference", "folded"]
    assert rows[0]["time ratio"] == rows[0]["memory ratio"] == 1
    assert rows[1]["MiB"] >= rows[3]["MiB"] > rows[0]["MiB"] > 0
    assert all(row["ms"] > 0 and row["images/s"] > 0 for row in rows)
    assert "MRLA_OPS" not in os.environ


def test_plain_with_folded_norms_stands_beside_plain(bench):
    code, err, tables = bench("models", "--depth", "18", "--paths", "folded")
    assert not code, err
    plain, folded_plain, ours = tables["train, eager"]
    assert [row["path"] for row in (plain, folded_plain, ours)] == ["plain", "plain, folded norms", "folded"]
    assert folded_plain["MiB"] > plain["MiB"]  # the weights that mmengine scales are more than maps of 64 x 64


def test_single_precision_is_compared_where_half_would_hide_a_wrong_path(bench, monkeypatch):
    """Rounding may be so large that all would pass; the comparison then leaves autocast, and timing does not."""
    compared, real = [], steps.results
    error = steps.benchmark.relative_error
    monkeypatch.setattr(steps, "results", lambda step: compared.append(step.args.amp) or real(step))
    monkeypatch.setattr(benchmark, "relative_error", lambda *args: 9.0 if len(compared) == 2 else error(*args))
    code, err, tables = bench("models", "--depth", "18", "--paths", "folded", "--amp")
    assert not code, err
    assert compared == [True, True, False, False, False]
    assert tables["train, eager"][-1]["path"] == "folded"


def test_branch(bench):
    code, err, tables = bench("branch", "--paths", "folded")
    assert not code, err
    (rows,) = tables.values()
    assert len(rows) == 4
    assert all(0 < row["share of bandwidth"] < 2 for row in rows)


def test_a_wrong_path_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(reference, "light_gate", lambda query, key: (query * key).sum(-1))
    code, err, tables = bench("models", "--depth", "18", "--paths", "folded")
    assert code and tables is None
    assert "folded differs from the reference" in err


def test_refusals(bench):
    assert "suite 'speed' is unknown" in bench("speed")[1]
    code, err, _ = bench("models", "--config", "configs/retinanet_r50_1x.py")
    assert code and "compare an MRLAResNet with plain ResNet" in err


def test_a_gpu_runs_what_was_queued_while_it_was_busy(monkeypatch):
    """The order of calls on a GPU that is not there: each measurement waits once, after its last launch."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def elapsed_time(self, end):
            return 16.0

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    found = benchmark.time_queued({"a": lambda: calls.append("a")}, 2, device=torch.device("cuda", 0))
    assert found == {"a": [0.016 / benchmark.QUEUED] * 2}
    assert calls == 3 * ["sleep", "record", *benchmark.QUEUED * ["a"], "record", "wait"]


def test_steps_in_half_precision_scale_their_loss(monkeypatch):
    """Gradients that float16 has no number for are found all the same, as in a training with a loss scale."""
    monkeypatch.setattr(steps.Step, "amp_dtype", torch.float16)
    common = dict(device=torch.device("cpu"), mode="train", channels_last=False, batch_size=1, size=(8, 8))
    found = {}
    for amp in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.Flatten(0))
        step = steps.Step(model, Namespace(amp=amp, **common))
        step.call = lambda images, model=model: [1e-3 * model(images)]
        step()
        (found[amp],) = (parameter.grad for parameter in model.parameters())
    torch.testing.assert_close(found[True] / steps.HALF_LOSS_SCALE, found[False], rtol=1e-2, atol=1e-9)
