"""Print what is installed and what would fail, with the remedy: ``python tools/doctor.py``.

It works even where ``import mrla_mm`` fails, so nothing but the standard library is imported at the
top.
"""

import importlib
import importlib.metadata
import importlib.util
import io
import math
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
REMEDIES = {
    "torchvision": "install the torchvision build that belongs to your torch (index, CUDA)",
    "cv2": "pip install opencv-python (opencv-python-headless on a machine without libGL)",
    **{name: f"pip install {distributions[0]}" for name, distributions in FAMILIES.items()},
}


class Report:
    """Prints findings as they come and remembers whether any of them stops training."""

    failed = False

    def ok(self, text: str) -> None:
        """Print what works."""
        print(f"  ok    {text}")

    def note(self, text: str) -> None:
        """Print what to know; training works."""
        print(f"  note  {text}")

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
        for check in (check_packages, check_ops, check_paths, check_checkpoints, check_configs):
            title = check.__doc__.rstrip(".")
            print(f"\n{title}")
            try:
                check(report)
            except Exception as error:  # a doctor that crashes is of no use
                report.fail(
                    f"{title.lower()}: {short(error)}",
                    "see the failures above; they usually explain this one",
                )
    print("\ntraining would NOT work: see FAIL above" if report.failed else "\ntraining would work")
    return int(report.failed)


def check_packages(report: Report) -> None:
    """Packages."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        report.note(f"Python {sys.version.split()[0]} has not been tried; 3.10 to 3.13 have")
    for distributions in FAMILIES.values():
        found = [name for name in distributions if version(name)]
        if len(found) > 1:
            report.fail(
                f"{' and '.join(found)} are both installed and overwrite each other's files",
                f"pip uninstall -y {' '.join(found)}, then install one of them",
            )
    for name in ("torch", "torchvision", "numpy", "cv2", "pycocotools", "matplotlib", *FAMILIES):
        try:
            module = importlib.import_module(name)
            report.ok(f"{name} {getattr(module, '__version__', None) or version(name) or ''}")
        except Exception as error:
            report.fail(
                f"{name} does not import: {short(error)}", REMEDIES.get(name, f"pip install {name}")
            )
    if importlib.util.find_spec("pkg_resources") is None:
        report.fail(
            f"no pkg_resources (setuptools {version('setuptools')}): mmengine finds no `mmdet::` config",
            'pip install "setuptools<81"',
        )


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
            remedy = (
                f"{spec.origin} was built for another torch or Python: reinstall it, or replace "
                "mmcv by mmcv-lite"
            )
        report.fail(f"import mrla_mm or mmcv.ops: {short(error)}", remedy)
        return
    import torch

    device, stand_in = "cuda" if torch.cuda.is_available() else "cpu", ext.is_stand_in()
    if stand_in:
        report.ok(
            "no compiled mmcv._ext, mrla_mm stands in; for a model that calls an op without: "
            f"{ext.REMEDY}"
        )
    else:
        report.ok(f"compiled mmcv._ext: {sys.modules['mmcv._ext'].__spec__.origin}")
    for name, probe in PROBES.items():
        try:
            answer, expected = probe(torch, device)
            if not math.isclose(answer, expected, rel_tol=1e-4):
                raise ArithmeticError(f"gives {answer} instead of {expected}")
            report.ok(f"{name} on {device}")
        except Exception as error:
            report.fail(
                f"{name} on {device}: {short(error)}",
                REMEDIES["torchvision"] if stand_in else ext.REMEDY,
            )


def check_paths(report: Report) -> None:
    """Paths of layer attention."""
    import torch
    from torch.utils.collect_env import get_nvidia_driver_version, run

    report.ok(f"Triton {version('triton') or 'is not installed'}")
    report.ok(f"GPU driver {get_nvidia_driver_version(run) or 'not found'}")
    report_path(report, torch.zeros(1, 32, 8, 8))
    for index in range(torch.cuda.device_count()):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.zeros(1, 32, 8, 8, device=f"cuda:{index}", dtype=dtype)
            report_path(report, x)
            report_path(report, x.to(memory_format=torch.channels_last))


def report_path(report: Report, x) -> None:
    """Print which path a map takes, why, and how far Triton was off in its self-check."""
    from mrla_mm.ops import choose_path
    from mrla_mm.ops.dispatch import OUTCOMES

    path, reason = choose_path(x)
    last = x.stride(1) == 1
    layout = "channels-last" if last else "contiguous"
    text = f"{x.device}, {x.dtype}, {layout}: {path} ({reason})"
    if outcome := OUTCOMES.get((x.device, x.dtype, last)):
        text += f"; largest difference in the self-check {outcome.difference:.1e}"
    show = report.note if path == "fused" and x.is_cuda else report.ok
    show(text)


def check_checkpoints(report: Report) -> None:
    """Checkpoints of mmengine."""
    import torch
    from mmengine.logging.history_buffer import HistoryBuffer

    from mrla_mm.torch_support import has_named_safe_globals

    if not has_named_safe_globals:
        return report.note(
            "this torch executes what a training checkpoint holds: resume from and test only yours"
        )
    file = io.BytesIO()
    torch.save({"log": HistoryBuffer([0.5], [1])}, file)
    file.seek(0)
    torch.load(file, weights_only=True)
    report.ok("they load with weights_only=True")


def check_configs(report: Report) -> None:
    """Configs."""
    from mmengine.config import Config

    for name in ("mmdet::_base_/default_runtime.py", "mrla_mm::retinanet_r50_mrla_light_1x.py"):
        report.ok(f"{name} is {Config._get_cfg_path(name, '')[0]}")


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def short(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _probe_nms(torch, device):
    from mmcv.ops import nms

    # IoU 1/3, or 1/2 with the last pixel counted.
    boxes = torch.tensor([[0.0, 0, 3, 3], [0.0, 0, 3, 1]], device=device)
    scores = torch.tensor([0.8, 0.9], device=device)
    return sum(10**i * len(nms(boxes, scores, 0.4, offset=i)[1]) for i in (0, 1)), 12


def _probe_roi_align(torch, device):
    from mmcv.ops import roi_align

    ramp = torch.arange(16.0, device=device).expand(1, 1, 16, 16).clone().requires_grad_()
    out = roi_align(
        ramp, torch.tensor([[0.0, 2, 2, 10, 10]], device=device), (4, 4), 1.0, 2, "avg", True
    )
    out.sum().backward()
    return out.mean().item() + ramp.grad.sum().item(), 5.5 + 16


PROBES = {"nms": _probe_nms, "roi_align": _probe_roi_align}
