"""What comes from outside: hashed packages, weights of stated hosts, nothing at import."""

import os
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from .conftest import ROOT
from .docs_fences import pages

pytestmark = pytest.mark.slow

OFFLINE = """
import socket

def refuse(*arguments, **keywords):
    raise SystemExit("this process asked for the network")

socket.socket.connect = socket.getaddrinfo = refuse

import mrla_mm
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mrla_mm import backbones, export

backbones.MRLAResNet(18)
backbones.MRLAViT("deit-tiny")
backbones.MRLACeiT("ceit-tiny")
backbones.MRLAPVTv2("b0")
backbones.MRLAEfficientNet("b0")
cfg = Config.fromfile("configs/retinanet_r50_mrla_light_1x.py")
init_default_scope("mmdet")
MODELS.build(cfg.model)
"""


def test_nothing_asks_the_network_before_weights_are_loaded():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", OFFLINE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_lock_satisfies_what_setup_asks_for():
    """Where one entry of a lock file has hashes, pip itself refuses those without."""
    lock = (ROOT / "requirements/lock.txt").read_text(encoding="utf-8")
    assert "--hash=sha256:" in lock
    asked, _ = (ROOT / "setup.py").read_text(encoding="utf-8").split('"deploy": [')
    requirements = [
        Requirement(found) for found in re.findall(r'^ .*"([\w-]+[><=][^"]+)"', asked, re.M)
    ]
    assert {"mmpretrain", "mmcv-lite", "setuptools"} <= {each.name for each in requirements}
    for requirement in requirements:
        found = re.findall(rf"^{requirement.name}==([^ ;\\]+)", lock, re.MULTILINE)
        assert found and all(map(requirement.specifier.contains, found)), requirement


def test_weights_come_from_places_that_the_documentation_states():
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages())
    hosts = set()
    for folder in ("configs", "mrla_mm", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            hosts |= set(re.findall(r"https?://([\w-]+(?:\.[\w-]+)+)", path.read_text("utf-8")))
    assert hosts and not [host for host in hosts if f"`{host}`" not in text]
