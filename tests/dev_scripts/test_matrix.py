"""The stacks of matrix.py are those that setup.py promises."""

import re

import matrix
from tests.conftest import ROOT


def test_the_stacks_cover_what_setup_promises():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", setup))
    assert {stack.python for name, stack in matrix.STACKS.items() if name.startswith("lock")} == promised
    oldest = " ".join(matrix.STACKS["torch-oldest"].installs[0])
    for package in ("torch", "torchvision"):
        bound = re.search(rf'"{package}>=([\d.]+)"', setup)[1]
        assert f"{package}=={bound}." in oldest
