"""mmengine's checkpoints load without executing anything, and no others."""

import argparse
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging.history_buffer import HistoryBuffer

from mrla_mm.errors import InputError
from mrla_mm.torch_support import load_weights_only

from ..engine.runs import EPOCHS, build
from ..weights.conftest import Payload

CHECK = dict(type="CheckpointCheckHook")


def train(folder, epochs, **options):
    """Train with mmengine's own checkpoints and the log history that it keeps."""
    runner = build(folder, loop=dict(EPOCHS, max_epochs=epochs), type="CheckpointHook", **options)
    runner.message_hub.update_info("best", np.float64(epochs))  # as an evaluator may leave it
    runner.train()
    return runner


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder, 1)


def test_a_run_resumes_with_its_history(trained):
    folder, first = trained
    second = train(folder, 2, resume=True)
    assert second.iter == 8 and second.message_hub.get_info("best") == 1
    history, past = (runner.message_hub.get_scalar("train/loss") for runner in (second, first))
    assert type(history) is HistoryBuffer and len(history.data[0]) == 8
    assert history.data[0].tolist()[:4] == past.data[0].tolist()
    assert history.mean(8) == pytest.approx(history.data[0].mean())
    assert history.statistics("max") == history.data[0].max()


def test_checkpoints_written_under_either_numpy_load(trained, tmp_path):
    cores = (b"numpy.core.multiarray", b"numpy._core.multiarray")
    source = zipfile.ZipFile(trained[0] / "epoch_1.pth")
    for core in cores:
        with zipfile.ZipFile(tmp_path / "other.pth", "w") as target:
            for item in source.infolist():
                data = source.read(item)
                if item.filename.endswith("data.pkl"):
                    data = data.replace(cores[0], core).replace(cores[1], core)
                    assert core in data
                target.writestr(item.filename, data)
        hub = load_weights_only(tmp_path / "other.pth")["message_hub"]
        loaded = hub["log_scalars"]["train/loss"]
        expected = trained[1].message_hub.get_scalar("train/loss")
        assert loaded.data[0].tolist() == expected.data[0].tolist()


@pytest.mark.parametrize("kind", ["bool", "uint16", "int64", "float32"])
def test_numpy_numbers_load(tmp_path, kind):
    values = np.arange(2).astype(kind)
    torch.save([values, values[1]], tmp_path / "numbers.pth")
    array, scalar = load_weights_only(tmp_path / "numbers.pth")
    np.testing.assert_array_equal(array, values, strict=True)
    assert scalar == values[1] and scalar.dtype == values.dtype


def wrapped_in_history(payload):
    history = HistoryBuffer([1.0], [1])
    history._log_history = np.array([payload], dtype=object)
    return history


@pytest.mark.parametrize(
    "place", [lambda p: p, lambda p: np.array([p], dtype=object), wrapped_in_history]
)
@pytest.mark.parametrize(
    "make", [lambda path: Payload(Path.touch, path), lambda p: Payload(p.touch)]
)
def test_a_malicious_checkpoint_is_refused_unexecuted(tmp_path, make, place):
    """The payload calls a function, or a bound method, which is pickled as a call of getattr."""
    victim, file = tmp_path / "created", tmp_path / "evil.pth"
    torch.save({"state_dict": {}, "meta": place(make(victim))}, file)
    with pytest.raises(pickle.UnpicklingError, match="(?i)weights.only"):
        load_weights_only(file)
    runner = build(tmp_path, hooks=[CHECK])
    runner._load_from = str(file)
    with pytest.raises(InputError, match="nothing was executed"):
        runner.train()
    (tmp_path / "last_checkpoint").write_text(str(file))
    with pytest.raises(InputError, match="nothing was executed"):
        build(tmp_path, hooks=[CHECK], resume=True).train()
    assert not victim.exists()
    torch.load(file, weights_only=False)
    assert victim.exists(), "the payload is harmless: the case tests nothing"


def test_torchscript_which_runs_when_it_is_loaded_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "script.pth"))
    with pytest.raises((pickle.UnpicklingError, RuntimeError), match="TorchScript"):
        load_weights_only(tmp_path / "script.pth")


def test_no_attribute_of_a_class_is_set(tmp_path):
    """BUILD with a pair as state sets attributes of what lies below it, here of a class."""
    program = b"\x80\x02cargparse\nNamespace\nN}X\x04\x00\x00\x00evilX\x01\x00\x00\x00xs\x86b."
    torch.save({}, tmp_path / "plain.pth")
    source = zipfile.ZipFile(tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "evil.pth", "w") as target:
        for item in source.infolist():
            is_pickle = item.filename.endswith("data.pkl")
            target.writestr(item.filename, program if is_pickle else source.read(item))
    with pytest.raises(pickle.UnpicklingError, match="class"):
        load_weights_only(tmp_path / "evil.pth", [argparse.Namespace])
    assert not hasattr(argparse.Namespace, "evil")


@pytest.mark.parametrize(
    "owner, name",
    [(HistoryBuffer, "__init__"), (HistoryBuffer, "__setstate__"), (np.ndarray, "max")],
)
def test_getattr_reaches_nothing_but_the_statistics(tmp_path, owner, name):
    torch.save(Payload(getattr, owner, name), tmp_path / "evil.pth")
    with pytest.raises(pickle.UnpicklingError, match=name):
        load_weights_only(tmp_path / "evil.pth")


def test_a_checkpoint_cannot_replace_the_statistics_of_the_process(tmp_path):
    class Poisoned(HistoryBuffer):
        def __getstate__(self):
            methods = {"mean": np.dtype, "extra": np.dtype}
            return super().__getstate__() | {"statistics_methods": methods}

    poisoned, file = Poisoned([1.0], [1]), tmp_path / "poisoned.pth"
    Poisoned.__module__, Poisoned.__qualname__ = HistoryBuffer.__module__, "HistoryBuffer"
    with pytest.MonkeyPatch.context() as patch:  # pickle looks the name up to check it
        patch.setattr("mmengine.logging.history_buffer.HistoryBuffer", Poisoned)
        torch.save(poisoned, file)
    loaded = load_weights_only(file)
    assert type(loaded) is HistoryBuffer and loaded.data[0].tolist() == [1.0]
    assert HistoryBuffer._statistics_methods["mean"] is HistoryBuffer.mean
    assert "extra" not in HistoryBuffer._statistics_methods
    assert "statistics_methods" not in loaded.__dict__
