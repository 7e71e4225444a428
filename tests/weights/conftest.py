"""Weight files of every kind, written without the package's own tables of names."""

import functools
import http.server
import io
import re
import threading

import pytest
import torch
import torchvision

from mrla_mm.backbones import MRLAResNet


def checkpoint_bytes(content=None, zipped=True):
    """Return what torch.save writes for some content, by default a small state dict."""
    buffer, content = io.BytesIO(), {"weight": torch.arange(3.0)} if content is None else content
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Return the folder of an empty download cache."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    return tmp_path / "hub/checkpoints"


@pytest.fixture
def serve():
    """Return `start(pages)`, which serves bytes by path on this machine and returns the address."""
    servers = []

    def start(pages):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = pages.get(self.path)
                self.send_response(404 if body is None else 200)
                if body is not None:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *args):
                pass

        httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        servers.append(httpd)
        return f"http://127.0.0.1:{httpd.server_address[1]}"

    yield start
    for httpd in servers:
        httpd.shutdown()
        httpd.server_close()


def scatter(model, seed=0):
    """Give every tensor of a model random values, so that none can be mistaken for another or for a fresh one."""
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            low = 0.5 if key.endswith(("running_var", "bn1.weight", "bn2.weight", "bn3.weight")) else -0.02
            tensor.uniform_(low, low + 1 if low > 0 else 0.02, generator=generator)
    return model


def torchvision_resnet(depth):
    """Return torchvision's ResNet with random values."""
    return scatter(getattr(torchvision.models, f"resnet{depth}")().eval())


def plain_resnet(depth=18):
    """Return the state dict of torchvision's ResNet cut to a quarter of its channels, which keeps tests quick."""
    return dict(_narrow_state(depth))


@functools.cache
def _narrow_state(depth):
    state = torchvision_resnet(depth).state_dict()
    for key, value in state.items():
        for dim, size in enumerate(value.shape[:2]):
            if size % 64 == 0:
                value = value.narrow(dim, 0, size // 4)
        state[key] = value.clone()
    return state


def narrow(depth=18, attention=None, **more):
    """Return a backbone for files with a quarter of the channels."""
    attention = attention or dict(type="MRLALight", head_channels=16)
    return MRLAResNet(depth, attention, base_channels=16, **more)


def released_resnet(variant, depth=18):
    """Return a state dict as the authors' ResNet code writes it, narrow: light with layerI.J, base with stages.I.J."""
    state = plain_resnet(depth)
    generator = torch.Generator().manual_seed(1)
    last = "bn3" if depth >= 50 else "bn2"
    for key in [key for key in state if key.endswith(f"{last}.weight")]:
        block, channels = key.removesuffix(f"{last}.weight"), len(state[key])
        kernel = {16: 3, 32: 3, 64: 3, 128: 5, 256: 5, 512: 5}[channels]
        for name, shape in {"Wq": (1, 1, kernel), "Wk": (1, 1, kernel), "Wv": (channels, 1, 3, 3)}.items():
            state[f"{block}mrla.mrla.{name}.weight"] = torch.randn(shape, generator=generator)
        if variant == "light":
            state[f"{block}mrla.lambda_t"] = torch.randn(channels, 1, 1, generator=generator)
        for name in ("weight", "bias", "running_mean", "running_var"):
            state[f"{block}bn_mrla.{name}"] = torch.rand(channels, generator=generator)
        state[f"{block}bn_mrla.num_batches_tracked"] = torch.tensor(7)
    if variant == "light":
        return state
    return {re.sub(r"^layer(\d)", lambda m: f"stages.{int(m[1]) - 1}", key): value for key, value in state.items()}
