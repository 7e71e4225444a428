"""README and documentation: commands parse, configs build, Python runs, links resolve."""

import os
import re
import sys
from pathlib import Path

import mmdet
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mrla_mm.config import read_config

from .conftest import ROOT, load_tool
from .docs_fences import commands, fences, pages

pytestmark = pytest.mark.slow
# Launchers: the tool they run, the places of the config and the checkpoint, and where the tool's
# own arguments begin.
LAUNCHERS = {
    "dist_train.sh": ("train", [0], 2),
    "dist_test.sh": ("test", [0, 1], 3),
    "slurm_train.sh": ("train", [2], 3),
}
BCCD = ROOT.parent / "shared/data/bccd"
# What a page's Python takes for granted.
PRELUDES = {
    "docs/analysis.md": """
import torch
from mmengine.registry import MODELS
class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = MODELS.build(dict(type="MRLAResNet", depth=18))
    def extract_feat(self, images):
        return self.backbone(images)
model, images = Detector().eval(), torch.rand(1, 3, 64, 64)
""",
    "docs/use_in_your_project.md": """
import os, tempfile, cv2, numpy, torch
from mrla_mm.config import read_config
from mrla_mm.inference import build_model
folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)
os.makedirs("pictures"), os.makedirs("work_dirs/my_config")
cfg = read_config("mrla_mm::quickstart/mask_rcnn_r18_mrla_light_shapes.py", {})
cfg.dump("my_config.py")
torch.save(build_model(cfg).state_dict(), "work_dirs/my_config/epoch_12.pth")
cv2.imwrite("pictures/1.jpg", numpy.zeros((64, 64, 3), numpy.uint8))
""",
}
COMMANDS, PYTHON = commands(), fences("python")
RUN_ELSEWHERE = {"docs/tutorial.md", "docs/deployment.md"}  # as a notebook; after an export
TOOLS_OF_MMDET = Path(mmdet.__file__).parent / ".mim/tools"


def is_config(fence):
    assigned = re.search(r"^(_base_|model) =", fence.text, re.MULTILINE)
    return assigned and not re.search(r"^(import|from) ", fence.text, re.MULTILINE)


def identify(item):
    if hasattr(item, "line"):
        return f"{item.page}:{item.line}"
    return f"{item[0]}: {' '.join(item[1])[:80]}"


def invocation(words):
    """The tool of ours that a command runs and its arguments, or None for another program."""
    program, *rest = words
    if program.rsplit("/", 1)[-1] in LAUNCHERS:
        tool, places, begin = LAUNCHERS[program.rsplit("/", 1)[-1]]
        return f"tools/{tool}.py", [*(rest[place] for place in places), *rest[begin:]]
    if "python" not in program or not rest:
        return None
    if rest[:3] == ["-m", "mrla_mm", "mmdet"]:
        assert (TOOLS_OF_MMDET / f"{rest[3]}.py").is_file(), rest[3]
        return None
    if rest[:2] == ["-m", "mrla_mm"]:
        return f"tools/{rest[2]}.py", rest[3:]
    return (rest[0], rest[1:]) if rest[0].startswith(("tools/", ".dev_scripts/")) else None


def build(cfg):
    init_default_scope(cfg.get("default_scope", "mmdet"))
    with torch.device("meta"):
        MODELS.build(cfg.model if "type" in cfg.model else cfg.model.backbone)


@pytest.fixture(scope="module")
def shown_configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for fence in PYTHON:
        if named := re.match(r"# (\w+\.py)\n", fence.text):
            (folder / named[1]).write_text(fence.text)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=identify)
def test_command(command, shown_configs, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, words = command
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    script, argv = invocation(words) or (None, [])
    if script is None:
        return
    module = load_tool(script)
    if not hasattr(module, "parse_args"):
        return
    args = module.parse_args(argv)
    config = getattr(args, "config", None)
    if isinstance(config, str) and config.endswith(".py"):
        config = str(shown_configs / config) if (shown_configs / config).is_file() else config
        options = getattr(args, "cfg_options", None) or {}
        cfg = read_config(config, options)
        if options:
            build(cfg)


@pytest.mark.parametrize("fence", [fence for fence in PYTHON if is_config(fence)], ids=identify)
def test_config_builds(fence, shown_configs):
    for package in re.findall(r'"(\w+)::', fence.text):
        pytest.importorskip(package)
    (shown_configs / "shown.py").write_text(fence.text)
    build(Config.fromfile(shown_configs / "shown.py"))


@pytest.mark.parametrize(
    "page", sorted({f.page for f in PYTHON if not is_config(f)} - RUN_ELSEWHERE)
)
def test_python_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace, registered = {}, dict(MODELS.module_dict)
    exec(PRELUDES.get(page, ""), namespace)
    try:
        for fence in PYTHON:
            if fence.page == page and not is_config(fence):
                exec(compile("\n" * fence.line + fence.text, str(ROOT / page), "exec"), namespace)
    finally:
        for name in set(MODELS.module_dict) - set(registered):
            del MODELS.module_dict[name]


def test_files_that_are_mentioned_exist():
    """Sphinx checks the links between the pages."""
    folders = r"(?:tools|configs|docs|tests|mrla_mm|\.dev_scripts)"
    for path in pages():
        text = path.read_text(encoding="utf-8")
        for name in re.findall(rf"(?<![\w/.])({folders}/[\w/]+\.(?:py|sh|md|yml))\b", text):
            assert re.search(r"/[A-Z]+\.", name) or (ROOT / name).exists(), f"{path} names {name}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(([^)#\s]+)", readme))
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_the_notebook_is_the_page():
    """But for the first line of a file, which in the notebook saves it."""
    jupytext = pytest.importorskip("jupytext")

    def cells(kind):
        read = jupytext.read(ROOT / f"docs/tutorial.{kind}").cells
        return [(c.cell_type, re.sub(r"\A%%writefile", "#", c.source)) for c in read]

    remedy = "run jupytext --to ipynb docs/tutorial.md, and write %%writefile for # above a file"
    assert cells("md") == cells("ipynb"), remedy


@pytest.mark.skipif(not BCCD.is_dir(), reason="no blood cells at ../shared/data/bccd")
def test_the_notebook_runs(tmp_path, monkeypatch):
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
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
