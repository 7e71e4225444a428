"""Metadata and packing of mrla_mm; tool settings live in pyproject.toml."""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mrla_mm/version.py").read_text())[1]
URL = os.environ.get("REPOSITORY_URL", "")  # of a release


def read_requirements(name):
    """Return the lines of a file in requirements/ without its comments."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line and line[0] != "#"]


def read_readme():
    """Return the README; with a URL its links lead there, since PyPI has no files beside it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if URL:
        text = re.sub(r"(!\[[^]]*\]\()(?=docs/)", rf"\1{URL}/raw/HEAD/", text)
        text = re.sub(r"(\]\()(?=docs/|[A-Z]+[.)])", rf"\1{URL}/blob/HEAD/", text)
    return text


def fill_mim_folder(link):
    """Put configs, tools and the model index where mim and `mrla_mm::` look: mrla_mm/.mim.

    Links follow the files of a checkout. Where the system refuses links, they are copies too.
    """
    folder = ROOT / "mrla_mm/.mim"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("configs", "tools", "model-index.yml"):
        source, target = ROOT / name, folder / name
        if link:
            try:
                target.symlink_to(Path("../..", name))
                continue
            except OSError:
                pass
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pth")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)


editable = {"develop", "editable_wheel"} & set(sys.argv)
if editable or "bdist_wheel" in sys.argv:
    fill_mim_folder(link=bool(editable))

setup(
    name="mrla_mm",
    version=VERSION,
    description="Multi-head recurrent layer attention (MRLA) backbones for MMDetection",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    author="mrla_mm contributors",
    url=URL,
    keywords="object detection, instance segmentation, layer attention, backbone, MMDetection",
    license="Apache-2.0",
    packages=find_packages(include=["mrla_mm", "mrla_mm.*"]),
    package_data={"mrla_mm": [".mim/**/*"]},
    python_requires=">=3.10",
    # Neither torch nor mmcv: of both the right build is the user's choice, and mmcv-lite would
    # overwrite a compiled mmcv.
    install_requires=read_requirements("runtime.txt"),
    extras_require={
        name: read_requirements(f"{name}.txt") for name in ("lite", "optional", "tests", "docs")
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Image Recognition",
    ],
)
