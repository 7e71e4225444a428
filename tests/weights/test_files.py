"""Broken, foreign and dangerous files stop with a message; nothing in them is executed."""

import argparse
import builtins
import hashlib
import os
import pickle
from collections import OrderedDict

import pytest
import torch

from mrla_mm.errors import InputError
from mrla_mm.torch_support import has_named_safe_globals
from mrla_mm.weights import load_weights, read_checkpoint

from .conftest import Payload, checkpoint_bytes, narrow, plain_resnet, same, save, without

reads_weights_only = pytest.mark.skipif(
    not has_named_safe_globals, reason="torch below 2.6 executes what a file holds"
)
PAGE = b"<!DOCTYPE html><html><title>Log in</title>"
BROKEN = {
    "page": (PAGE, "damaged"),
    "cut": (checkpoint_bytes()[:300], "damaged"),
    "list": (checkpoint_bytes([torch.rand(1)]), "a list"),
    "torchscript": (torch.jit.script(torch.nn.Linear(1, 1)).save_to_buffer(), "TorchScript"),
    "detectron2": (pickle.dumps({"model": {}}, protocol=4), "cannot be read"),
    "module": (checkpoint_bytes(torch.nn.Linear(1, 1)), "torch.nn.modules.linear.Linear"),
}


@reads_weights_only
@pytest.mark.parametrize(("content", "expected"), BROKEN.values(), ids=BROKEN)
def test_broken_files(content, expected, tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(InputError, match=expected) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)


@reads_weights_only
@pytest.mark.parametrize(("function", "zipped"), [(builtins.exec, True), (os.system, False)])
def test_code_in_a_file_is_not_executed(function, zipped, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    victim, path = tmp_path / "created", tmp_path / "evil.pth"
    code = f"open({str(victim)!r}, 'w')" if function is builtins.exec else f"touch {victim}"
    path.write_bytes(checkpoint_bytes({"state_dict": {"w": Payload(function, code)}}, zipped))
    with pytest.raises(InputError, match=function.__name__):
        read_checkpoint(path)
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists(), "the payload is harmless: the case tests nothing"


@reads_weights_only
def test_arguments_of_a_training_script_are_read(tmp_path):
    """DeiT's training script saves an argparse.Namespace, allowed only while we read a file."""
    path = tmp_path / "deit.pth"
    torch.save({"model": {"w": torch.ones(1)}, "args": argparse.Namespace(lr=0.1)}, path)
    assert read_checkpoint(path)["args"].lr == 0.1
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = plain_resnet()
    path = tmp_path / "w.safetensors"
    safetensors.save_file(state, path)
    assert same(read_checkpoint(path), state)
    assert not load_weights(narrow(), path).faults()
    for damaged in (path.read_bytes()[:-9], b"\xff" * 8 + b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ("location", "expected"),
    [("torchvision://resnet51", "resnet50"), ("gone.pth", "not a file"), ("foo://x", "foo://x")],
)
def test_locations_that_lead_nowhere(location, expected):
    with pytest.raises(InputError, match=expected):
        read_checkpoint(location)


def test_files_with_unusual_content(tmp_path):
    cyclic = {"meta": {}}
    cyclic["state_dict"] = cyclic
    with pytest.raises(InputError, match="no weights"):
        load_weights(narrow(), save(tmp_path, cyclic))
    state = OrderedDict(without(narrow().state_dict(), ".mrla."))
    state._metadata = ["a list"]
    assert not load_weights(narrow(), save(tmp_path, state)).faults()
    with pytest.raises(InputError) as caught:
        load_weights(narrow(), save(tmp_path, {"layer1.\nERROR: forged": torch.ones(1)}))
    assert "forged" in str(caught.value) and "\n" not in str(caught.value)


def test_fetched_once(served, cache):
    folder, address = served
    content = checkpoint_bytes()
    path = folder / f"w-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    path.write_bytes(content)
    for _ in range(2):
        assert read_checkpoint(f"{address}/{path.name}?raw=1")["weight"].tolist() == [0, 1, 2]
        path.unlink(missing_ok=True)
    assert [file.name for file in cache.iterdir()] == [path.name]


UNFIT = {
    "w-0123abcd.pth": "w-0123abcd.pth, or",
    "gone.pth": "404.*hub/checkpoints/gone.pth.*init_cfg=None",
}


@pytest.mark.parametrize(("name", "expected"), UNFIT.items())
def test_downloads_that_fail_leave_nothing(name, expected, served, cache):
    folder, address = served
    (folder / "w-0123abcd.pth").write_bytes(checkpoint_bytes())
    with pytest.raises(InputError, match=expected):
        read_checkpoint(f"{address}/{name}")
    assert not list(cache.iterdir())
