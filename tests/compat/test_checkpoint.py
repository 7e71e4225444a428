"""mmengine's checkpoints load under torch's restricted unpickler, and nothing else does that should not."""

import builtins
import pickle
import zipfile
from pathlib import Path

import mmengine.runner.checkpoint
import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler
from mmengine.logging.history_buffer import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.runner import CheckpointLoader, Runner

from mrla_mm.compat import checkpoint


class Line(BaseModel):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, *points, mode):
        return dict(loss=self.linear(torch.stack(points)).square().mean())


def runner(folder, epochs, name, **options):
    """Two iterations per epoch with momentum, a schedule and the log history that mmengine keeps."""
    return Runner(
        model=Line(),
        work_dir=str(folder),
        train_dataloader=dict(
            dataset=[torch.ones(2), torch.zeros(2), torch.ones(2) * 2, torch.ones(2) * 3],
            sampler=dict(type=DefaultSampler, shuffle=True),
            batch_size=2,
            num_workers=0,
        ),
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9)),
        param_scheduler=[dict(type="LinearLR", start_factor=0.1, end=2), dict(type="MultiStepLR", milestones=[1])],
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", interval=1), logger=dict(type="LoggerHook", interval=1)
        ),
        default_scope="mmengine",
        randomness=dict(seed=0),
        experiment_name=name,
        **options,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    first = runner(folder, 1, "first")
    first.message_hub.update_info("best_score", np.float64(0.25))  # as an evaluator may leave it
    first.train()
    return folder, first


@pytest.fixture
def nothing_allowed():
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(allowed)


def test_a_run_resumes_with_its_history(trained):
    folder, first = trained
    second = runner(folder, 2, "second", resume=True)
    second.train()
    assert second.epoch == 2 and second.iter == 4
    history = second.message_hub.get_scalar("train/loss")
    assert type(history) is HistoryBuffer
    past = first.message_hub.get_scalar("train/loss").data[0]
    assert len(past) == 2 and history.data[0].tolist()[:2] == past.tolist() and len(history.data[0]) == 4
    assert history.mean(4) == pytest.approx(history.data[0].mean())
    assert history.statistics("max") == history.data[0].max()
    assert second.message_hub.get_info("best_score") == 0.25
    saved = CheckpointLoader.load_checkpoint(str(folder / "epoch_1.pth"))
    assert saved["optimizer"]["state"][0]["momentum_buffer"].abs().sum() > 0
    assert saved["param_schedulers"][0]["last_step"] == 1


def test_without_the_allow_list_torch_refuses(trained, nothing_allowed):
    with pytest.raises(pickle.UnpicklingError, match="HistoryBuffer"):
        CheckpointLoader.load_checkpoint(str(trained[0] / "epoch_1.pth"))


def test_checkpoints_written_under_either_numpy_load(trained, tmp_path):
    original = trained[0] / "epoch_1.pth"
    for core in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        other = tmp_path / "other.pth"
        with zipfile.ZipFile(original) as source, zipfile.ZipFile(other, "w", zipfile.ZIP_STORED) as target:
            for item in source.infolist():
                data = source.read(item)
                for name in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
                    if item.filename.endswith("data.pkl"):
                        data = data.replace(name, core)
                target.writestr(item.filename, data)
                assert not item.filename.endswith("data.pkl") or core in data
        loaded = torch.load(other)
        losses = loaded["message_hub"]["log_scalars"]["train/loss"].data[0]
        assert losses.tolist() == trained[1].message_hub.get_scalar("train/loss").data[0].tolist()


@pytest.mark.parametrize("kind", ["bool", "uint16", "int64", "float32"])
def test_numpy_numbers_load(tmp_path, kind):
    values = {"scalar": np.ones(1, kind)[0], "array": np.arange(2).astype(kind)}
    torch.save(values, tmp_path / "numbers.pth")
    loaded = torch.load(tmp_path / "numbers.pth")
    assert loaded["scalar"] == values["scalar"] and loaded["scalar"].dtype == np.dtype(kind)
    assert loaded["array"].tolist() == values["array"].tolist() and loaded["array"].dtype == np.dtype(kind)


class Payload:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def wrapped_in_history(payload):
    history = HistoryBuffer([1.0], [1])
    history._log_history = np.array([payload], dtype=object)
    return history


@pytest.mark.parametrize("place", [lambda p: p, lambda p: np.array([p], dtype=object), wrapped_in_history])
@pytest.mark.parametrize("function", ["exec", "touch", "getattr"])
def test_a_malicious_checkpoint_is_refused_unexecuted(tmp_path, function, place):
    victim, file = tmp_path / "created", tmp_path / "evil.pth"
    payloads = {
        "exec": Payload(builtins.exec, f"open({str(victim)!r}, 'w')"),
        "touch": Payload(Path.touch, victim),
        "getattr": Payload(victim.touch),  # a bound method: pickled as getattr(victim, "touch")
    }
    torch.save({"state_dict": {}, "meta": place(payloads[function])}, file)
    with pytest.raises(pickle.UnpicklingError, match="(?i)weights.only"):
        CheckpointLoader.load_checkpoint(str(file))
    assert not victim.exists()
    torch.load(file, weights_only=False)
    assert victim.exists(), "the payload is harmless: the case tests nothing"


@pytest.mark.parametrize(
    "owner, name", [(HistoryBuffer, "__init__"), (HistoryBuffer, "__setstate__"), (np.ndarray, "max")]
)
def test_getattr_reaches_nothing_but_the_statistics(tmp_path, owner, name):
    torch.save(Payload(getattr, owner, name), tmp_path / "evil.pth")
    with pytest.raises(pickle.UnpicklingError, match=name):
        torch.load(tmp_path / "evil.pth")


def test_a_checkpoint_cannot_replace_the_statistics_of_the_process(tmp_path):
    history = HistoryBuffer([1.0], [1])
    state = dict(history.__getstate__(), statistics_methods={"mean": np.dtype, "extra": np.dtype})

    class Poisoned(HistoryBuffer):
        def __getstate__(self):
            return state

    poisoned = Poisoned([1.0], [1])
    file = tmp_path / "poisoned.pth"
    Poisoned.__module__, Poisoned.__qualname__ = HistoryBuffer.__module__, "HistoryBuffer"
    with pytest.MonkeyPatch.context() as patch:  # pickle looks the name up to check it
        patch.setattr("mmengine.logging.history_buffer.HistoryBuffer", Poisoned)
        torch.save(poisoned, file)
    loaded = torch.load(file)
    assert type(loaded) is HistoryBuffer and loaded.data[0].tolist() == [1.0]
    assert HistoryBuffer._statistics_methods["mean"] is HistoryBuffer.mean
    assert "extra" not in HistoryBuffer._statistics_methods and "statistics_methods" not in loaded.__dict__


def test_a_loader_that_falls_back_to_any_pickle_is_replaced(tmp_path, monkeypatch):
    """OneDL's mmengine has one; its other tests are those above, on its stack."""
    victim = tmp_path / "created"
    torch.save(Payload(Path.touch, victim), tmp_path / "evil.pth")
    fallback = lambda file, map_location=None, weights_only=None: torch.load(file, weights_only=False)  # noqa: E731
    monkeypatch.setattr(mmengine.runner.checkpoint, "_safe_torch_load", fallback, raising=False)
    checkpoint.allow_mmengine_checkpoints()
    with pytest.raises(pickle.UnpicklingError):
        mmengine.runner.checkpoint._safe_torch_load(tmp_path / "evil.pth")
    assert not victim.exists()
