"""What the package takes from outside: locked and hashed packages, stated places of weights, no network at import."""

import ast
import os
import re
import subprocess
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, load_tool

LOCK, DEV = "requirements/lock.txt", "requirements/dev.txt"

OFFLINE = """
import socket, sys
asked = []

def refuse(self, *arguments, **keywords):
    asked.append(arguments)
    raise OSError("this process has no network")

for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, lambda *arguments, **keywords: refuse(None, *arguments))

import mrla_mm
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mrla_mm import backbones, export
from mrla_mm.compat.config_scope import config_path

backbones.MRLAResNet(18)
backbones.MRLAViT("deit-tiny")
backbones.MRLACeiT("ceit-tiny")
backbones.MRLAPVTv2("b0")
backbones.MRLAEfficientNet("b0")
cfg = Config.fromfile(config_path("retinanet_r50_mrla_light_1x"))
init_default_scope("mmdet")
MODELS.build(cfg.model)
assert not asked, asked
try:
    socket.create_connection(("example.org", 80))
except OSError:
    print(f"blocked {len(asked)}")
"""


def test_nothing_asks_the_network_before_weights_are_loaded():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", OFFLINE]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "blocked 1"


def locked(path):
    """Return (name, version, number of hashes) of every requirement of a lock file."""
    entries = re.split(r"\n(?=[A-Za-z0-9])", (ROOT / path).read_text(encoding="utf-8"))
    found = (re.match(r"([A-Za-z0-9_.-]+)==([^ ;\\]+)", entry) for entry in entries)
    return [
        (m[1], m[2], len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)))
        for entry, m in zip(entries, found, strict=True)
        if m
    ]


def test_every_locked_package_has_one_version_and_hashes():
    for path in (LOCK, DEV):
        text = (ROOT / path).read_text(encoding="utf-8")
        requirements = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
        entries = locked(path)
        assert len(entries) == len(requirements) > 50, path
        assert [entry for entry in entries if entry[2] == 0] == []


def test_the_lock_satisfies_what_setup_asks_for():
    versions = {canonicalize_name(name): [] for name, _, _ in locked(LOCK)}
    for name, version, _ in locked(LOCK):
        versions[canonicalize_name(name)].append(version)
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (asked,) = (
        ast.literal_eval(k.value) for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg == "install_requires"
    )
    for requirement in map(Requirement, asked):
        found = versions.get(canonicalize_name(requirement.name), [])
        assert found, requirement
        assert all(requirement.specifier.contains(version) for version in found), (requirement, found)


def test_the_page_of_licences_has_every_locked_package():
    page = (ROOT / "docs/licenses.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| ([A-Za-z0-9_.-]+) \|", page, re.MULTILINE))
    assert {name for path in (LOCK, DEV) for name, _, _ in locked(path)} <= listed
    assert "| unknown |" not in page


def test_licences_are_judged():
    verdict = load_tool("licenses").verdict
    assert verdict("Apache-2.0 OR BSD-2-Clause") == verdict("MIT License") == verdict("GPL-3.0 OR MIT") == "permissive"
    assert verdict("MPL-2.0 AND MIT") == verdict("LGPL-2.1-or-later") == "weak copyleft"
    assert verdict("GPL-2.0-or-later") == verdict("GNU General Public License v3") == "copyleft"
    assert verdict("LicenseRef-NVIDIA-Proprietary") == "proprietary"
    assert verdict("ask the author") == "unknown"


def test_weights_come_from_the_places_that_the_page_states():
    page = (ROOT / "docs/supply_chain.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "configs").rglob("*.py"), *(ROOT / "mrla_mm").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    hosts = {host for path in sources for host in re.findall(r"https?://([\w.-]+)", path.read_text(encoding="utf-8"))}
    assert hosts, "no address at all: the pattern is wrong"
    assert not [host for host in hosts if f"`{host}`" not in page]
