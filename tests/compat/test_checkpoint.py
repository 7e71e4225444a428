"""mmengine's checkpoints load without executing anything, and no others."""

import argparse
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging.history_buffer import HistoryBuffer

from mrla_mm.errors import InputError
from mrla_mm.torch_support import has_named_safe_globals, load_weights_only
from mrla_mm.weights.files import read_file

from ..engine.runs import EPOCHS, build
from ..weights.conftest import Payload

pytestmark = pytest.mark.skipif(
    not has_named_safe_globals, reason="torch below 2.6 executes what a file holds"
)
CHECK = dict(type="CheckpointCheckHook")
RECONSTRUCT, _, _ = np.zeros(1).__reduce__()
SCALAR, _ = np.float64(0).__reduce__()


def train(folder, epochs, **options):
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
    past = first.message_hub.get_scalar("train/loss").data[0].tolist()
    history = second.message_hub.get_scalar("train/loss")
    assert len(history.data[0]) == 8 and history.data[0].tolist()[:4] == past
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


@pytest.mark.parametrize("kind", ["bool", "int64", ">f8"])
def test_numpy_numbers_load_and_are_saved_as_plain_arrays(tmp_path, kind):
    values = np.arange(2).astype(kind)
    torch.save([values, values[1]], tmp_path / "numbers.pth")
    array, scalar = load_weights_only(tmp_path / "numbers.pth")
    assert np.array_equal(array, values) and array.dtype == values.dtype.newbyteorder("=")
    assert scalar == values[1] and scalar.dtype == array.dtype
    assert type(pickle.loads(pickle.dumps(array))) is np.ndarray


@pytest.mark.parametrize("allowed", [[np.ndarray, RECONSTRUCT], [np.dtype], [SCALAR]])
def test_numbers_load_whatever_of_numpy_others_allow(tmp_path, allowed):
    torch.save([np.ones(2), np.float64(3)], tmp_path / "numbers.pth")
    array, scalar = load_weights_only(tmp_path / "numbers.pth", allowed)
    assert array.tolist() == [1, 1] and scalar == 3


OF_OTHERS = [np.array(["a", "bcd"]), np.array([1 + 2j]), np.array([{"a": 1}], dtype=object)]


def test_what_others_allow_loads_beside_the_package(tmp_path):
    torch.save([*OF_OTHERS, OF_OTHERS[0][1], HistoryBuffer([1.0], [1])], tmp_path / "others.pth")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "others.pth", weights_only=True)
    theirs = [np.ndarray, RECONSTRUCT, np.dtype, SCALAR, *{type(each.dtype) for each in OF_OTHERS}]
    with torch.serialization.safe_globals(theirs):
        *arrays, text, history = torch.load(tmp_path / "others.pth", weights_only=True)
    for array, expected in zip(arrays, OF_OTHERS, strict=True):
        assert array.dtype == expected.dtype and array.tolist() == expected.tolist()
    assert text == "bcd" and history.mean() == 1
    assert HistoryBuffer._statistics_methods["mean"] is HistoryBuffer.mean


def history_with(**state):
    history = HistoryBuffer([1.0], [1])
    vars(history).update(state)
    return history


PLACES = {
    "bare": lambda payload: payload,
    "array": lambda payload: np.array([payload], dtype=object),
    "history": lambda payload: history_with(_log_history=np.array([payload], dtype=object)),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_malicious_checkpoint_is_refused_unexecuted(tmp_path, place):
    victim, file = tmp_path / "created", tmp_path / "evil.pth"
    torch.save({"state_dict": {}, "meta": place(Payload(Path.touch, victim))}, file)
    with pytest.raises(InputError, match="holds more than weights"):
        build(tmp_path, hooks=[CHECK], load_from=str(file)).train()
    (tmp_path / "last_checkpoint").write_text(str(file))
    with pytest.raises(InputError, match="holds more than weights"):
        build(tmp_path, hooks=[CHECK], resume=True).train()
    assert not victim.exists()
    torch.load(file, weights_only=False)
    assert victim.exists(), "the payload is harmless: the case tests nothing"


def write_program(path, program):
    torch.save({}, path)
    source = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    with zipfile.ZipFile(path, "w") as target:
        for item in source.infolist():
            is_pickle = item.filename.endswith("data.pkl")
            content = b"\x80\x02" + program + b"." if is_pickle else source.read(item)
            target.writestr(item.filename, content)


@pytest.mark.parametrize("owner", [b"argparse\nNamespace", b"torch\nFloatStorage"])
def test_no_attribute_of_what_a_process_shares_is_set(tmp_path, owner):
    """BUILD with a pair as state sets attributes of what lies below it, here of a class."""
    state = b"N}X\x04\x00\x00\x00evilX\x01\x00\x00\x00xs\x86b"
    write_program(tmp_path / "evil.pth", b"c" + owner + b"\n" + state)
    with pytest.raises(pickle.UnpicklingError, match="class|build"):
        load_weights_only(tmp_path / "evil.pth", [argparse.Namespace])
    assert not hasattr(argparse.Namespace, "evil")


def dtype(code, state=None):
    return Payload(np.dtype, code, False, True, state=state)


def array_state(dtype, content):
    return (1, (1,), dtype, False, content)


def array(state=None):
    return Payload(RECONSTRUCT, np.ndarray, (0,), b"b", state=state)


REFUSED = {  # arrays of pointers, histories of something else than numbers, and other methods
    "array": (Payload(np.ndarray, (1,), "O", b"AAAAAAAA"), ""),
    "what memory held": (Payload(np.ndarray, (9,), "f8"), ""),
    "state": (array(array_state(dtype("O"), b"AAAAAAAA")), ""),
    "state of another size": (array(array_state(dtype("f8"), bytes(16))), ""),
    "state of objects": (array(array_state(dtype("f8"), [1.0])), ""),
    "scalar": (Payload(SCALAR, dtype("O"), b"AAAAAAAA"), ""),
    "fields": (Payload(np.dtype, [("a", "O")]), ""),
    "length of a history": (history_with(max_length="9"), "HistoryBuffer"),
    "losses of a history": (history_with(_log_history={}), "HistoryBuffer"),
    "counts of a history": (history_with(_count_history=torch.ones(1)), "HistoryBuffer"),
    "constructor": (Payload(getattr, HistoryBuffer, "__init__"), "__init__"),
    "setter of state": (Payload(getattr, HistoryBuffer, "__setstate__"), "__setstate__"),
    "method of an array": (Payload(getattr, np.ndarray, "max"), "max"),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_what_no_run_of_mmengines_saves_is_refused(attack, tmp_path):
    content, named = REFUSED[attack]
    torch.save(content, tmp_path / "evil.pth")
    with pytest.raises((ValueError, pickle.UnpicklingError), match=named or None):
        load_weights_only(tmp_path / "evil.pth")
    with pytest.raises(InputError, match="damaged or holds more than weights"):
        read_file(tmp_path / "evil.pth")


def test_a_dtype_does_not_claim_another_size(tmp_path):
    claim = (3, "<", (np.dtype("f8"), (10**7,)), None, None, -1, -1, 0)
    values = [array(array_state(dtype("f8", claim), bytes(8)))]
    values.append(Payload(SCALAR, dtype("f8", claim), bytes(8)))
    torch.save(values, tmp_path / "evil.pth")
    for loaded in load_weights_only(tmp_path / "evil.pth"):
        assert loaded.dtype == np.float64 and loaded.dtype.shape == () and loaded.nbytes == 8


def opcodes(value):
    return pickle.dumps(value, 2)[2:-1]  # without PROTO and STOP


FILL = opcodes(array_state(dtype("f8"), bytes(8))) + b"b"


@pytest.mark.parametrize("first", [b"", FILL], ids=["empty", "filled"])
def test_no_tensor_shares_an_array_that_gets_its_state_later(tmp_path, first):
    """numpy frees the memory that the array had, and that torch.from_numpy has taken over."""
    remember, recall = b"q\xc8", b"h\xc8"
    share = b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n"
    options = opcodes(torch.float64) + opcodes("cpu") + opcodes(False)
    program = opcodes(array()) + remember + first + share + b"(" + recall + options + b"tR"
    write_program(tmp_path / "shared.pth", program)
    if first:
        assert load_weights_only(tmp_path / "shared.pth").tolist() == [0]
    write_program(tmp_path / "evil.pth", program + recall + FILL)
    with pytest.raises((TypeError, pickle.UnpicklingError)):
        load_weights_only(tmp_path / "evil.pth")


def test_a_checkpoint_cannot_replace_the_statistics_of_the_process(tmp_path):
    state = vars(HistoryBuffer([1.0], [1])) | {"statistics_methods": {"mean": np.dtype}}
    torch.save(Payload(HistoryBuffer, state=state), tmp_path / "poisoned.pth")
    loaded = load_weights_only(tmp_path / "poisoned.pth")
    assert type(loaded) is HistoryBuffer and loaded.data[0].tolist() == [1.0]
    assert HistoryBuffer._statistics_methods["mean"] is HistoryBuffer.mean
    assert "statistics_methods" not in vars(loaded)
