"""Print what is installed and what would fail, with the remedy: ``python tools/doctor.py``.

It works where ``import mrla_mm`` fails, and on Python from 3.8 on: nothing but the standard library
is imported at the top.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

FAMILIES = {  # import name: the distributions that provide it, of which only one may be installed
    "mmengine": ("mmengine", "onedl-mmengine", "mmengine-lite"),
    "mmcv": ("mmcv-lite", "mmcv", "mmcv-full", "onedl-mmcv"),
    "mmdet": ("mmdet", "onedl-mmdetection"),
    "mmpretrain": ("mmpretrain", "onedl-mmpretrain"),
}
OLDEST_PYTHON = (3, 10)
PIP_NAMES = {"cv2": "opencv-python-headless", "mmcv": "mmcv-lite==2.1.0"}
REMEDIES = {  # of what is installed and does not import
    "torchvision": "install the torchvision build that belongs to your torch (index, CUDA)",
    "cv2": "on a machine without libGL, put opencv-python-headless in the place of opencv-python",
}


class Report:
    """Prints findings as they come and remembers whether any of them stops training."""

    failed = False

    def ok(self, text: str) -> None:
        """Print what works."""
        print(f"  ok    {text}")

    def fail(self, text: str, remedy: str) -> None:
        """Print what stops training."""
        self.failed = True
        print(f"  FAIL  {text}\n        remedy: {remedy}")


def main(argv: Sequence[str] = ()) -> int:
    """Examine everything; return 0 if training would work, 1 otherwise."""
    if argv:
        print(__doc__)
        return 0 if argv[0] in ("-h", "--help") else 2
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in (check_python, check_packages, check_ops):
            title = check.__doc__.rstrip(".")
            print(f"\n{title}")
            try:
                check(report)
            except Exception as error:  # a doctor that crashes is of no use
                report.fail(f"{title.lower()}: {short(error)}", "repair the failures above first")
    print("\ntraining would NOT work: see FAIL above" if report.failed else "\ntraining would work")
    return int(report.failed)


def check_python(report: Report) -> None:
    """Python."""
    number = sys.version.split()[0]
    if sys.version_info >= OLDEST_PYTHON:
        report.ok(number)
    else:
        report.fail(number, "make an environment with Python {}.{} or newer".format(*OLDEST_PYTHON))


def check_packages(report: Report) -> None:
    """Packages."""
    for distributions in FAMILIES.values():
        found = [name for name in distributions if version(name)]
        if len(found) > 1:
            names = " and ".join(found)
            remedy = f"pip uninstall -y {' '.join(found)}, then install one of them"
            report.fail(f"{names} are both installed and overwrite each other's files", remedy)
    for name in ("torch", "torchvision", "numpy", "cv2", "pycocotools", "matplotlib", *FAMILIES):
        if name == "mmpretrain" and importlib.util.find_spec(name) is None:
            needs = "DeiT, CeiT, ImageNet recipes and backbones named mmpretrain.* need it"
            report.ok(f"mmpretrain is not installed; {needs}")
            continue
        try:
            module = importlib.import_module(name)
            report.ok(f"{name} {getattr(module, '__version__', None) or version(name) or ''}")
        except Exception as error:
            report.fail(f"{name} does not import: {short(error)}", remedy_for(name, error))
    spec = importlib.util.find_spec("mrla_mm")
    if spec is not None and spec.origin is None:  # a namespace package, which imports silently
        folders = ", ".join(spec.submodule_search_locations)
        report.fail(f"{folders} holds no package, but what an uninstalled one left", "delete it")
    try:
        config = importlib.import_module("mmengine.config").Config
        importlib.import_module("mrla_mm")
        config._get_cfg_path("mmdet::_base_/default_runtime.py", "")
    except Exception as error:
        report.fail(f"`mmdet::` configs are not found: {short(error)}", "repair the failures above")
    try:
        importlib.import_module("mmdet.models")
    except Exception as error:
        remedy = "repair the failures above; without any, mmpretrain 1.2 takes transformers < 4.56"
        report.fail(f"mmdet.models does not import: {short(error)}", remedy)


def remedy_for(name: str, error: Exception) -> str:
    """Return what to do about a package that does not import, which keeps what is compiled."""
    if importlib.util.find_spec(name) is None:
        return f"pip install {PIP_NAMES.get(name, name)}"
    if "incompatible" in str(error):  # of OpenMMLab's packages, which name the versions they take
        return "put the version that it asks for in the place of the one that is installed"
    return REMEDIES.get(name, f"repair the failures above first, else reinstall {name}")


def check_ops(report: Report) -> None:
    """Compiled ops of mmcv."""
    try:
        importlib.import_module("mrla_mm")
        import mmcv.ops  # noqa: F401

        from mrla_mm.compat import ext
    except Exception as error:
        spec = importlib.util.find_spec("mmcv._ext") if importlib.util.find_spec("mmcv") else None
        remedy = "repair the failures above first"
        if spec is not None and spec.origin and Path(spec.origin).exists():
            cause = f"{spec.origin} was built for another torch or Python"
            remedy = f"{cause}: reinstall it, or replace mmcv by mmcv-lite"
        report.fail(f"import mrla_mm or mmcv.ops: {short(error)}", remedy)
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    remedy = ext.REMEDY
    if ext.is_stand_in():
        report.ok(f"no compiled mmcv._ext, mrla_mm stands in; for an op it lacks: {ext.REMEDY}")
        remedy = REMEDIES["torchvision"]
    else:
        report.ok(f"compiled mmcv._ext: {sys.modules['mmcv._ext'].__spec__.origin}")
    try:
        run_ops(device)
        report.ok(f"nms and roi_align on {device}")
    except Exception as error:
        report.fail(f"nms and roi_align on {device}: {short(error)}", remedy)


def run_ops(device: str) -> None:
    """Run the two ops that most detectors need."""
    import torch
    from mmcv.ops import nms, roi_align

    boxes = torch.tensor([[0.0, 0, 3, 3]], device=device)
    nms(boxes, boxes[:, 2], 0.5)
    image = torch.ones(1, 1, 8, 8, device=device)
    roi_align(image, torch.nn.functional.pad(boxes, (1, 0)), (2, 2), 1.0, 0, "avg", True)


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def short(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed
    sys.exit(main(sys.argv[1:]))
