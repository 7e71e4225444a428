"""Metadata and packing of mrla_mm; tool settings live in pyproject.toml."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
url = os.environ.get("REPOSITORY_URL")
if url:  # of a release: PyPI shows the README without the files beside it
    README = re.sub(r"(!\[[^]]*\]\()(?=docs/)", rf"\1{url}/raw/HEAD/", README)
    README = re.sub(r"(\]\()(?=docs/|[A-Z]+[.)])", rf"\1{url}/blob/HEAD/", README)
SUFFIXES = "py", "sh", "yml", "md", "jpg", "pth"  # tools, configs and a trained detector
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mrla_mm/version.py").read_text())[1]

# mrla_mm/.mim holds links to configs/ and tools/, so that `mrla_mm::` configs are found in a
# checkout, an editable install and a wheel alike; setuptools follows the links and packs the files.
setup(
    name="mrla_mm",
    version=VERSION,
    description="Multi-head recurrent layer attention (MRLA) backbones for MMDetection",
    long_description=README,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mrla_mm", "mrla_mm.*"]),
    package_data={"mrla_mm": [f".mim/**/*.{suffix}" for suffix in SUFFIXES]},
    python_requires=">=3.10",
    # Nothing is required: an environment with mmdet has what it needs, and pip must replace none of
    # it. mmcv-lite overwrites mmcv, mmpretrain OneDL's, opencv-python opencv-python-headless. An
    # import says what is missing.
    extras_require={
        "lite": [
            "torch>=2.1",
            "torchvision>=0.16",
            "mmengine>=0.10.5,<1",
            "mmcv-lite>=2.0.1,<2.2",
            "mmdet>=3.1.0,<3.4",
            "mmpretrain>=1.0.0",
            "setuptools<81",  # with pkg_resources, which tools of mmengine's and mmdet's own import
        ],
        "deploy": ["onnx>=1.16", "onnxscript", "onnxruntime>=1.17"],
        "tools": ["seaborn", "psutil", "tensorboard"],  # mmdet's analyze_logs, benchmark
        "docs": ["sphinx>=7", "myst-parser>=3", "furo", "sphinx-copybutton"],
        "dev": ["pytest>=8", "pytest-xdist", "pylint>=3", "ruff>=0.6", "build"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Image Recognition",
    ],
)
