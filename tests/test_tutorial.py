"""The tutorial's notebook is its page, and runs on a few images."""

import os
import re
import sys

import pytest

from .conftest import ROOT

jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
pytestmark = pytest.mark.slow
BCCD = ROOT.parent / "shared/data/bccd"


def test_the_notebook_is_the_page():
    """But for the first line of a file, which in the notebook saves it."""

    def cells(kind):
        read = jupytext.read(ROOT / f"docs/tutorial.{kind}").cells
        return [(c.cell_type, re.sub(r"\A%%writefile", "#", c.source)) for c in read]

    remedy = "run jupytext --to ipynb docs/tutorial.md, and write %%writefile for # above a file"
    assert cells("md") == cells("ipynb"), remedy


@pytest.mark.skipif(not BCCD.is_dir(), reason="no blood cells at ../shared/data/bccd")
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    names = tmp_path / "data/bccd/ImageSets/Main"
    names.mkdir(parents=True)
    for folder in ("Annotations", "JPEGImages"):
        (tmp_path / "data/bccd" / folder).symlink_to(BCCD / folder)
    for split in ("train", "val", "test"):
        lines = (BCCD / f"ImageSets/Main/{split}.txt").read_text().splitlines()
        (names / f"{split}.txt").write_text("\n".join(lines[:2]))
    notebook = jupytext.read(ROOT / "docs/tutorial.ipynb")
    notebook.cells = [cell for cell in notebook.cells if "git clone" not in cell.source]
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, resources=folder).execute()
