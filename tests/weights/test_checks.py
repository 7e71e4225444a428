"""Weights are looked for before a run: each way of not finding them says what to do."""

import http.server
import threading
import urllib.error

import pytest
import torch
from mmengine.config import Config

from mrla_mm.errors import InputError
from mrla_mm.weights import check_weights, checks


def config(checkpoint=None, *, backbone=None, **more):
    backbone = dict(type="MRLAResNet", depth=18) | (backbone or {})
    if checkpoint is not None:
        backbone["init_cfg"] = dict(type="Pretrained", checkpoint=str(checkpoint))
    return Config(dict(model=dict(type="RetinaNet", backbone=backbone), **more))


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No network, and an empty download cache; returns the folder of the cache."""

    def refuse(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(checks.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    return tmp_path / "hub/checkpoints"


def message(cfg):
    with pytest.raises(InputError) as caught:
        check_weights(cfg)
    return str(caught.value)


def test_missing_file_names_path_and_option(tmp_path):
    """A local path that is not there is named with the option that starts without it."""
    said = message(config(tmp_path / "resnet.pth"))
    assert str(tmp_path / "resnet.pth") in said and "--cfg-options model.backbone.init_cfg=None" in said


def test_empty_file(tmp_path):
    """An empty file is no weights."""
    (tmp_path / "w.pth").touch()
    assert "empty file" in message(config(tmp_path / "w.pth"))


def test_existing_file_passes(tmp_path):
    """A file that is there is left alone."""
    (tmp_path / "w.pth").write_bytes(b"x")
    check_weights(config(tmp_path / "w.pth"))


def test_load_from_missing(tmp_path):
    """The checkpoint to start or test from is looked for as well."""
    said = message(config(load_from=str(tmp_path / "gone.pth")))
    assert "load_from" in said and "gone.pth" in said


@pytest.mark.parametrize(
    "location, file",
    [
        ("torchvision://resnet50", "resnet50-0676ba61.pth"),
        ("https://example.org/a/weights.pth?raw=1", "weights.pth"),
        ("mmcls://resnet50", "resnet50_8xb32_in1k_20210831-ea4938fc.pth"),
        ("open-mmlab://detectron/resnet50_caffe", "resnet50_caffe-788b5fa3.pth"),
    ],
)
def test_unreachable_says_where_to_put_the_file(offline, location, file):
    """Offline, the message has the reason, the place in the cache and the option; with the file there, all is well."""
    said = message(config(location))
    assert "no route to host" in said and str(offline / file) in said and "model.backbone.init_cfg=None" in said
    (offline / file).write_bytes(b"x")
    check_weights(config(location))


def test_unknown_name_has_neighbours():
    """A misspelt catalogue name is answered with the nearest ones."""
    said = message(config("torchvision://resnet5O"))
    assert "'resnet5O'" in said and "resnet50" in said


@pytest.fixture
def server():
    """A web server on this machine that has /there.pth and nothing else."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/there.pth" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


def test_real_server(server):
    """A URL that answers passes; one that does not exist is reported with the server's answer."""
    check_weights(config(f"{server}/there.pth"))
    assert "404" in message(config(f"{server}/gone.pth"))


def test_weights_of_every_part_are_checked(tmp_path):
    """Pretrained weights of any module of the model are found, in lists too."""
    cfg = config()
    cfg.model.roi_head = dict(
        bbox_head=[dict(), dict(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "h")))]
    )
    assert message(cfg).startswith("model.roi_head.bbox_head.1.init_cfg: ")


def test_resume_needs_no_pretrained_weights(tmp_path):
    """A run that continues from a checkpoint does not ask for the weights it once started from."""
    checkpoint = tmp_path / "epoch_1.pth"
    checkpoint.write_bytes(b"x")
    check_weights(config(tmp_path / "gone.pth", resume=True, load_from=str(checkpoint)))


@pytest.mark.parametrize("frozen", [dict(frozen_stages=1), dict(frozen_stages=0), dict(norm_eval=True)])
def test_frozen_random_layers_warn(frozen):
    """Frozen layers without weights are warned of, with the option that frees them."""
    (key, value), *_ = frozen.items()
    with pytest.warns(UserWarning, match=f"(?s)RANDOM WEIGHTS.*{key}={value}.*frozen_stages=-1"):
        check_weights(config(backbone=frozen))


@pytest.mark.filterwarnings("error:THE BACKBONE")
def test_no_warning_with_weights(tmp_path):
    """Weights of the backbone, a checkpoint, or nothing frozen: no warning."""
    (tmp_path / "w.pth").write_bytes(b"x")
    check_weights(config(tmp_path / "w.pth", backbone=dict(frozen_stages=1, norm_eval=True)))
    check_weights(config(backbone=dict(frozen_stages=1), load_from=str(tmp_path / "w.pth")))
    check_weights(config(backbone=dict(frozen_stages=-1)))
