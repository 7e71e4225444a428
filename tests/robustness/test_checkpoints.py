"""Weight files with anything wrong: nothing is loaded and the error names the file, or all that the model has loads."""

import math
import random
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrla_mm.backbones import MRLAResNet
from mrla_mm.errors import InputError
from mrla_mm.weights import files
from mrla_mm.weights.loading import load_weights

from .fuzzing import fuzz, judge

ARGUMENTS = dict(depth=18, base_channels=4, layer_attention=dict(type="MRLALight", head_channels=4))


def model(seed):
    torch.manual_seed(seed)
    built = MRLAResNet(**ARGUMENTS)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.uniform_(-1, 1)
    return built


def damage_state(state, kind, rng):
    """Do one thing to the tensors of a state dict."""
    name = rng.choice(list(state))
    value = state[name]
    if kind == "drop":
        del state[name]
    elif kind == "rename":
        state[name + "x"] = state.pop(name)
    elif kind == "extra":
        state["layer1.9.conv1.weight"] = torch.zeros(1)
    elif kind == "shape":
        state[name] = torch.zeros(3, *value.shape)
    elif kind == "dtype":
        state[name] = value.to(rng.choice([torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64]))
    elif kind in ("nan", "inf", "huge"):
        number = {"nan": math.nan, "inf": math.inf, "huge": 1e300}[kind]
        state[name] = torch.full_like(value, number, dtype=torch.float64)
    elif kind == "no tensor":
        state[name] = rng.choice([None, "x", 1.0, [1.0]])
    elif kind == "sparse":
        state[name] = value.to_sparse()
    elif kind == "meta":
        state[name] = torch.empty(value.shape, device="meta")
    elif kind == "number as key":
        state[rng.randrange(9)] = state.pop(name)


KINDS = ["drop", "rename", "extra", "shape", "dtype", "nan", "inf", "huge", "no tensor", "sparse", "meta"]
KINDS += ["number as key"]
COUNTER = "num_batches_tracked"  # of a batch norm: what old files lack and a model starts at zero


@pytest.fixture(scope="module")
def whole():
    return model(1).state_dict()


def load_and_hold(path, saved, before):
    """Load, and hold that the model has what was saved, or on an error what it had.

    A counter that the file lacks stays as it was; nothing else may be lacking.
    """
    target = model(2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_weights(target, path)
    except Exception:
        assert all(torch.equal(value, before[key]) for key, value in target.state_dict().items()), "loaded in part"
        raise
    for key, value in target.state_dict().items():
        assert torch.isfinite(value.double()).all(), key
        if saved is not None:
            assert key in saved or key.endswith(COUNTER), key
            assert torch.equal(value, saved.get(key, before[key]).to(value.dtype)), key


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_state(kind, whole, tmp_path):
    path, before = tmp_path / "weights.pth", model(2).state_dict()

    @fuzz(4)
    @given(st.integers(0, 2**32))
    def check(seed):
        rng, state = random.Random(seed), dict(whole)
        damage_state(state, kind, rng)
        torch.save(dict(state_dict=state) if rng.random() < 0.5 else state, path)
        error = judge(f"checkpoint: {kind}", lambda: load_and_hold(path, state, before), named=[path])
        harmless = kind == "dtype" or set(whole) - set(state) <= {name for name in whole if name.endswith(COUNTER)}
        assert error or (harmless and kind in ("dtype", "drop", "number as key")), f"{kind} went unseen"

    check()


@pytest.mark.parametrize("prefix", ["", "module.backbone."])
@pytest.mark.parametrize("value", [None, "x", 1.0, [1.0]], ids=str)
@pytest.mark.parametrize("name", [f"bn1.{COUNTER}", "conv1.weight", "layer1.0.mrla.attention.history_scale"])
def test_a_counter_may_be_missing_but_nothing_may_be_another_thing_than_a_tensor(name, value, prefix, whole, tmp_path):
    path, before = tmp_path / "weights.pth", model(2).state_dict()

    def load(state):
        state = {prefix + key: tensor for key, tensor in state.items()}
        torch.save(dict(state_dict=state) if prefix else state, path)
        load_and_hold(path, {key.removeprefix(prefix): tensor for key, tensor in state.items()}, before)

    with pytest.raises(InputError, match=rf"{name} \(it is no tensor but {type(value).__name__}\)"):
        load(whole | {name: value})
    without = {key: tensor for key, tensor in whole.items() if key != name}
    if name.endswith(COUNTER):
        load(without)
    else:
        with pytest.raises(InputError, match=f"not in the file: {name}"):
            load(without)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old format"])
@pytest.mark.parametrize("damage", ["cut", "bits", "bytes", "swap", "append"])
def test_damaged_bytes(zipped, damage, whole, tmp_path):
    """A published file has its SHA-256 in its name: no flipped bit goes unseen. Any other loads or says why not."""
    path, before = tmp_path / "weights.pth", model(2).state_dict()
    torch.save(dict(whole), path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()

    @fuzz(8)
    @given(st.integers(0, 2**32), st.booleans())
    def check(seed, published):
        rng, broken = random.Random(seed), bytearray(data)
        if damage == "cut":
            broken = broken[: rng.randrange(len(data) - 1)]
        elif damage == "bits":
            broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif damage == "bytes":
            at = rng.randrange(len(data) - 64)
            broken[at : at + 64] = rng.randbytes(64)
        elif damage == "swap":
            half = rng.randrange(1, len(data))
            broken = broken[half:] + broken[:half]
        else:
            broken += rng.randbytes(100)
        name = f"weights-{files.digest_of(path)[:8]}.pth" if published else "broken.pth"
        target = path.with_name(name)
        target.write_bytes(broken)
        label = f"checkpoint: {damage}{', hash in its name' if published else ''}"
        error = judge(label, lambda: load_and_hold(target, None, before), named=[target])
        assert error or not published

    check()
