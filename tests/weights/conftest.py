"""Weight files of every kind, written without the package's own tables of names."""

import functools
import http.server
import io
import threading

import pytest
import torch

from mrla_mm.backbones import MRLAResNet

LIGHT, BASE = dict(type="MRLALight", head_channels=16), dict(type="MRLABase", head_channels=16)
VARIANTS = pytest.mark.parametrize(("variant", "attention"), [("light", LIGHT), ("base", BASE)])


def checkpoint_bytes(content=None, zipped=True):
    buffer, content = io.BytesIO(), {"weight": torch.arange(3.0)} if content is None else content
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


class Payload:
    """Pickles as a call of a function, and a state for what it returns."""

    def __init__(self, function, *arguments, state=None):
        self.call = function, arguments, state

    def __reduce__(self):
        return self.call


def save(tmp_path, content, name="w.pth"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def same(state, expected):
    return state.keys() == expected.keys() and all(
        torch.equal(state[key], expected[key]) for key in expected
    )


def prefixed(state, prefix):
    return {f"{prefix}{key}": value for key, value in state.items()}


def without(state, *keys):
    return {key: value for key, value in state.items() if not any(each in key for each in keys)}


def random_layers(shapes):
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        state[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
        state[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    return state


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    return tmp_path / "hub/checkpoints"


@pytest.fixture
def served(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def scatter(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = ("running_var", "bn1.weight", "bn2.weight", "bn3.weight")
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            low, high = (0.5, 1.5) if key.endswith(scales) else (-0.02, 0.02)
            tensor.uniform_(low, high, generator=generator)
    return model


def narrow(depth=18, attention=None, **more):
    return MRLAResNet(depth, attention or LIGHT, base_channels=16, **more)


def plain_resnet(depth=18):
    channels = 512 if depth >= 50 else 128
    head = random_layers({"fc": (1000, channels)})
    return without(scatter(narrow(depth)).state_dict(), ".mrla.") | head


@pytest.fixture(scope="module")
def trained():
    return scatter(narrow()).state_dict()


RELEASED = {
    ".mrla.attention.query.": ".mrla.mrla.Wq.",
    ".mrla.attention.key.": ".mrla.mrla.Wk.",
    ".mrla.attention.value.": ".mrla.mrla.Wv.",
    ".mrla.attention.history_scale": ".mrla.lambda_t",
    ".mrla.norm.": ".bn_mrla.",
}
STAGES = {f"layer{index + 1}.": f"stages.{index}." for index in range(4)}


def released_resnet(variant, depth=18):
    if variant is None:
        return plain_resnet(depth)
    model = narrow(depth, LIGHT if variant == "light" else BASE)
    names = RELEASED if variant == "light" else RELEASED | STAGES
    state = {}
    for name, tensor in scatter(model, seed=1).state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = tensor.view(-1, 1, 1) if name.endswith("lambda_t") else tensor
    return state | random_layers({"fc": (1000, 128)})
