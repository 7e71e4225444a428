"""What comes from outside: hashed packages, nothing at import."""

import re

import pytest
from packaging.requirements import Requirement

from .conftest import ROOT, run_python

pytestmark = pytest.mark.slow

OFFLINE = """
import socket

def refuse(*arguments, **keywords):
    raise SystemExit("this process asked for the network")

socket.socket.connect = socket.getaddrinfo = refuse

from mrla_mm.config import read_config
from mrla_mm.inference import build_model

for name in ("r50", "deit_t", "ceit_t", "pvtv2_b0", "efficientnet_b0"):
    build_model(read_config(f"mrla_mm::retinanet_{name}_mrla_light_1x.py", {}))
"""


def test_nothing_asks_the_network_before_weights_are_loaded():
    run_python("-W", "ignore", "-c", OFFLINE)


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
