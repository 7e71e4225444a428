"""What comes from outside: hashed packages, weights of stated hosts, nothing at import."""

import ast
import os
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def locked(name):
    """Versions by package of a lock file, all of which have hashes."""
    versions = {}
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text):
        package, version = re.match(r"([A-Za-z0-9_.-]+)==([^ ;\\]+)", entry).groups()
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), f"{package} has no hash"
        versions.setdefault(canonicalize_name(package), []).append(version)
    return versions


def test_the_lock_satisfies_what_setup_asks_for():
    versions = locked("lock.txt")
    assert len(versions) > 50 and len(locked("dev.txt")) > 50
    calls = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    keywords = {}
    for node in calls:
        if isinstance(node, ast.keyword):
            keywords[node.arg] = node.value
    extras = ast.literal_eval(keywords["extras_require"])
    bare = ast.literal_eval(keywords["install_requires"]) + extras["lite"]
    for requirement in map(Requirement, bare):
        found = versions.get(canonicalize_name(requirement.name), [])
        assert found, requirement
        assert all(requirement.specifier.contains(version) for version in found), found


def test_weights_come_from_places_that_the_documentation_states():
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages())
    hosts = set()
    for folder in ("configs", "mrla_mm", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            hosts |= set(re.findall(r"https?://([\w-]+(?:\.[\w-]+)+)", path.read_text("utf-8")))
    assert hosts and not [host for host in hosts if f"`{host}`" not in text]
