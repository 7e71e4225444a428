import ast
import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from mrla_mm.weights.files import cache_path, remote_url

TOOL = Path(__file__).parents[2] / "tools" / "doctor.py"


@pytest.fixture
def doctor(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(TOOL))["load_doctor"]()


def test_a_healthy_installation_passes(doctor, capsys):
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 0 and "FAIL" not in printed, printed
    for text in ("mmdet 3", "ok    nms on", "ok    roi_align (max) on", "weights_only=True", "training would work"):
        assert text in printed


@pytest.mark.parametrize("name", ["torch", "torchvision", "mmcv", "mmdet", "pycocotools", "mmcv.ops"])
def test_a_missing_package_is_named_and_nothing_crashes(doctor, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, name, None)
    code, printed = doctor.main(), capsys.readouterr().out
    assert code == 1
    failures = [line for line in printed.splitlines() if "FAIL" in line]
    assert any(name in line for line in failures), printed
    assert printed.count("remedy: ") == printed.count("  FAIL  ")


def test_extras_are_those_of_setup(doctor):
    tree = ast.parse((TOOL.parents[1] / "setup.py").read_text(encoding="utf-8"))
    extras = next(
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for key in node.keywords
        if key.arg == "extras_require"
    )
    declared = {
        name: [re.match(r"[\w-]+", each)[0] for each in packages] for name, packages in ast.literal_eval(extras).items()
    }
    assert {name: list(packages) for name, (_, packages) in doctor.EXTRAS.items()} == declared


def test_extras_are_installed_or_say_how(doctor, monkeypatch, capsys):
    found = {"onnx": "1.0", "onnxscript": "1.0", "torchcam": "0.5"}
    version = doctor._version
    extras = {name for _, names in doctor.EXTRAS.values() for name in names}
    monkeypatch.setattr(doctor, "_version", lambda name: found.get(name) if name in extras else version(name))
    assert doctor.main() == 0, "extras are optional"
    printed = " ".join(capsys.readouterr().out.split())
    assert "ok cam (class activation maps): torchcam 0.5" in printed
    assert "deploy (ONNX export) lacks onnxruntime: pip install" in printed and '"mrla_mm[deploy]"' in printed
    assert "docs (building the documentation) is not installed: pip install" in printed


def test_stubs_are_counted_and_named_on_request(doctor, capsys):
    if importlib.util.find_spec("mmcv._ext") and sys.modules["mmcv._ext"].__spec__.origin.endswith(".so"):
        pytest.skip("compiled mmcv has no stubs")
    doctor.main()
    short = capsys.readouterr().out
    assert "raise when called (--verbose names them)" in short and "carafe_forward" not in short
    doctor.main(["--verbose"])
    long = capsys.readouterr().out
    stubs = re.findall(r"\w+", long.split("stubs, which raise when called: ")[1].split("  note  ")[0])
    assert "carafe_forward" in stubs and f"The other {len(stubs)} raise" in short


def test_two_mmcv_are_reported(doctor, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: "2.1.0" if name in ("mmcv", "mmcv-lite") else None)
    assert doctor.main() == 1
    assert "mmcv-lite and mmcv are both installed" in capsys.readouterr().out


def test_missing_pkg_resources_is_reported(doctor, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pkg_resources" else find_spec(name))
    assert doctor.main() == 1
    assert 'pip install "setuptools<81"' in capsys.readouterr().out


def test_a_wrong_op_is_reported(doctor, monkeypatch, capsys):
    monkeypatch.setitem(doctor.PROBES, "nms", lambda torch, device: (1.0, 2.0))
    assert doctor.main() == 1
    assert "gives 1.0 instead of 2.0" in capsys.readouterr().out


def test_start_weights_are_here_or_say_how(doctor, monkeypatch, capsys, tmp_path):
    """Cached ones with their place, torn ones by name, the others with the way to fetch them; nothing is fetched."""

    def refuse(*_, **__):
        raise AssertionError("the doctor touched the network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert doctor.main(["--verbose"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    said = printed.split("Weights that configs start from")[1]
    assert " ok " not in said and f"They lie in {tmp_path}/checkpoints" in said
    assert "are not here (torchvision://resnet50," in said and "read_checkpoint('torchvision://resnet50')" in said
    assert all(name in said for name in ("torchvision://resnet50", "torchvision://resnet152", "deit_tiny_patch16_224"))
    (tmp_path / "checkpoints").mkdir()
    whole, torn = (cache_path(remote_url(f"torchvision://resnet{depth}")) for depth in (50, 101))
    torch.save({}, whole)
    torn.write_bytes(whole.read_bytes()[:-30])
    assert doctor.main() == 0, "weights are fetched when they are needed"
    said = " ".join(capsys.readouterr().out.split()).split("Weights that configs start from")[1]
    assert f"ok torchvision://resnet50 is here: {whole}" in said
    assert f"torchvision://resnet101: weights {torn} are cut off" in said and "--verbose names them" in said
