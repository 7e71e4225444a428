"""The built package works without this repository, and asks for nothing that it does not say."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .conftest import ROOT, environment, run_python, tiny_options, write_coco
from .docs_fences import fences
from .test_smoke import scalars

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a source archive of a copy, in which building leaves folders behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("mrla_mm", "configs", "tools", "tests", "docs", "requirements"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy(path, source)
    for name in ("LICENSE", "Makefile"):
        shutil.copy(ROOT / name, source)
    build = ["-m", "build", "--no-isolation", "--outdir", target, source]
    url = "https://github.com/us/mrla_mm"
    run_python(*build, cwd=target, PYTHONPATH="", REPOSITORY_URL=url)
    return next(target.glob("*.whl"))


def requirements(name):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line.partition("#")[0]) for line in lines if not line.startswith("#")]


def test_what_archive_and_wheel_carry_and_what_they_ask_for(wheel):
    (archive,) = wheel.parent.glob("*.tar.gz")
    run_python("-m", "twine", "check", "--strict", wheel, archive, cwd=wheel.parent)
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    for folder in ("tests", "docs", "configs", "tools", "requirements"):
        files = subprocess.check_output(["git", "ls-files", folder], cwd=ROOT, text=True)
        missing = set(files.splitlines()) - names
        assert all(name.startswith("tests/dev_scripts/") for name in missing)
    assert not any(name.startswith((".dev_scripts", "mrla_mm/.mim")) for name in names)
    archive = zipfile.ZipFile(wheel)
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    packed = [path for folder in ("configs", "tools") for path in (ROOT / folder).rglob("*.*")]
    packed = [path.relative_to(ROOT) for path in packed if path.suffix not in (".pyc", ".pth")]
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "mrla_mm").rglob("*.py")]
    modules = [name for name in modules if "/.mim/" not in name]
    assert names == {*modules, *(f"mrla_mm/.mim/{path}" for path in [*packed, "model-index.yml"])}
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = archive.read(name).decode()
    assert "](https://github.com/us/mrla_mm/raw/HEAD/docs/_static/method.svg)" in metadata
    asked = re.findall("^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE)
    assert set(map(Requirement, asked)) == set(requirements("runtime.txt"))
    assert all("://" in target for target in re.findall(r"\]\(([^)]*)\)", metadata))


def test_a_project_outside_the_repository_trains_from_the_wheel(wheel, tmp_path):
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(site)
    pets = write_coco(project / "pets", names=("cat", "dog"))
    (pets / "train2017").rename(pets / "images")
    for name in ("train.json", "val.json"):
        shutil.copy(pets / "annotations/instances_train2017.json", pets / name)
    (shown,) = (f for f in fences("python") if f.text.startswith("# my_config.py\n"))
    (project / "my_config.py").write_text(shown.text)
    outside = dict(cwd=project, PYTHONPATH=str(site))
    where = run_python("-c", "import mrla_mm; print(mrla_mm.__file__)", **outside)
    assert where.strip() == str(site / "mrla_mm/__init__.py")
    options = tiny_options("mask_rcnn_r50_", "", "train_cfg.max_epochs=1")
    options.remove("data_root=")
    run_python("-m", "mrla_mm", "train", "my_config.py", "--cfg-options", *options, **outside)
    work_dir = project / "work_dirs/my_config"
    assert (work_dir / "epoch_1.pth").is_file()
    assert all(line["loss_mask"] > 0 for line in scalars(work_dir) if "loss" in line)
    assert any("coco/segm_mAP" in line for line in scalars(work_dir))


BUILD = """
import mrla_mm
from mmengine.registry import MODELS
MODELS.build(dict(type="MRLAResNet", depth=18))
print("built")
MODELS.build(dict(type="MRLAViT"))
"""


def test_detectors_on_resnet_do_without_mmpretrain(tmp_path):
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith("mmpretrain"):
            (tmp_path / path.name).symlink_to(path)
    command = [sys.executable, "-S", "-W", "ignore", "-c", BUILD]
    found = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    done = subprocess.run(command, env=found, capture_output=True, text=True)
    assert "built" in done.stdout and "MRLAViT is not in the" in done.stderr


OFFLINE = """
import socket
def refuse(*arguments, **keywords):
    raise SystemExit("this process asked for the network")
socket.socket.connect = socket.getaddrinfo = refuse
from mrla_mm.config import read_config
from mrla_mm.inference import build_model
for name in ("retinanet_r50", "transformers/retinanet_deit_t"):
    build_model(read_config(f"mrla_mm::{name}_mrla_light_1x.py", {}))
"""


def test_nothing_asks_the_network_before_weights_are_loaded():
    run_python("-W", "ignore", "-c", OFFLINE)


def test_the_lock_satisfies_what_setup_asks_for():
    lock = (ROOT / "requirements/lock.txt").read_text(encoding="utf-8")
    assert "--hash=sha256:" in lock
    for requirement in requirements("runtime.txt") + requirements("lite.txt"):
        found = re.findall(rf"^{requirement.name}==([^ ;\\]+)", lock, re.MULTILINE)
        assert found and all(map(requirement.specifier.contains, found)), requirement
