"""Print what is installed, which op path is taken and what would fail, with the remedy.

Run ``python tools/doctor.py``, which works even where ``import mrla_mm`` fails (``python -m mrla_mm.compat.doctor``
imports the package first). Imports nothing at the top but the standard library, since anything may be broken.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import io
import math
import platform
import re
import runpy
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

FAMILIES = {  # import name: the distributions that provide it, of which only one may be installed
    "mmengine": ("mmengine", "onedl-mmengine", "mmengine-lite"),
    "mmcv": ("mmcv-lite", "mmcv", "mmcv-full", "onedl-mmcv"),
    "mmdet": ("mmdet", "onedl-mmdetection"),
    "mmpretrain": ("mmpretrain", "onedl-mmpretrain"),
}
OTHERS = {
    "torchvision": "install the torchvision build that belongs to your torch (same index, same CUDA)",
    "numpy": "pip install numpy",
    "cv2": "pip install opencv-python (or opencv-python-headless on a machine without libGL)",
    "pycocotools": "pip install pycocotools",
    "matplotlib": "pip install matplotlib",
}
EXTRAS = {  # setup.py's optional extras: what for, and the distributions that make one up
    "cam": ("class activation maps", ("torchcam",)),
    "deploy": ("ONNX export", ("onnx", "onnxscript", "onnxruntime")),
    "docs": ("building the documentation", ("sphinx", "myst-parser", "furo")),
    "dev": ("tests and lint", ("pytest", "pytest-xdist", "hypothesis", "pylint", "ruff", "build")),
}
INHERITED = ("torchvision://resnet50", "torchvision://resnet101")  # weights that mmdet's bases of our configs name
PROBES = runpy.run_path(str(Path(__file__).with_name("doctor_probes.py")))["PROBES"]


class Report:
    """Prints findings as they come and remembers whether any of them stops training."""

    def __init__(self, *, verbose: bool = False) -> None:
        self.failed, self.verbose = False, verbose

    def title(self, text: str) -> None:
        """Begin a section."""
        print(f"\n{text}")

    def ok(self, text: str) -> None:
        """Something works."""
        print(f"  ok    {text}")

    def note(self, text: str) -> None:
        """Something to know; training works."""
        indents = dict(initial_indent="  note  ", subsequent_indent=" " * 8)
        print(textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False, **indents))  # paths stay whole

    def fail(self, text: str, remedy: str) -> None:
        """Something that stops training."""
        self.failed = True
        print(f"  FAIL  {text}\n        remedy: {remedy}")


def main(argv: Sequence[str] = ()) -> int:
    """Examine everything; 0 if training would work, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="doctor.py", description="Say what is installed and what would fail.")
    parser.add_argument("--verbose", action="store_true", help="name every op, the stubs too")
    report = Report(verbose=parser.parse_args(argv).verbose)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for title, check in (
            ("Python and torch", check_torch),
            ("Packages", check_packages),
            ("Optional extras", check_extras),
            ("Compiled ops", check_ops),
            ("Checkpoints", check_checkpoints),
            ("Configs", check_configs),
            ("Weights that configs start from", check_weights),
        ):
            report.title(title)
            try:
                check(report)
            except Exception as error:  # a doctor that crashes is of no use
                report.fail(
                    f"{title.lower()}: {_short(error)}", "see the failures above; they usually explain this one"
                )
    print("\ntraining would NOT work: see FAIL above" if report.failed else "\ntraining would work")
    return int(report.failed)


def check_torch(report: Report) -> None:
    """Python, torch and the device."""
    version = platform.python_version()
    if (3, 10) <= sys.version_info[:2] <= (3, 12):
        report.ok(f"Python {version} ({sys.executable})")
    else:
        report.fail(f"Python {version} is not supported", "use Python 3.10 to 3.12")
    torch = _import(report, "torch", "pip install torch")
    if torch is None:
        return
    if torch.cuda.is_available():
        report.ok(f"CUDA device {torch.cuda.get_device_name(0)} (torch built for CUDA {torch.version.cuda})")
    elif torch.version.cuda:
        report.note(f"torch is built for CUDA {torch.version.cuda} but sees no device: everything runs on the CPU.")
    else:
        report.note("torch is built for the CPU.")
    if not torch.cuda.is_available():
        report.note("--amp needs CUDA: mmengine's AmpOptimWrapper refuses the CPU.")


def check_packages(report: Report) -> None:
    """The packages mrla_mm stands on: present, importable, and installed once."""
    for name, distributions in FAMILIES.items():
        found = [d for d in distributions if _version(d)]
        if len(found) > 1:
            report.fail(
                f"{' and '.join(found)} are both installed and overwrite each other's files (import {name})",
                f"pip uninstall -y {' '.join(found)}, then install one of them",
            )
        _import(report, name, f"pip install {distributions[0]}")
    forks = [d for names in FAMILIES.values() for d in names if d.startswith("onedl-") and _version(d)]
    if forks:
        report.note(f"OneDL forks in use: {', '.join(forks)}. Install all four or none.")
    for name, remedy in OTHERS.items():
        _import(report, name, remedy)
    if importlib.util.find_spec("pkg_resources"):
        report.ok(f"setuptools {_version('setuptools')} with pkg_resources")
    else:
        report.fail(
            f"no pkg_resources (setuptools {_version('setuptools')}): mmengine cannot find `mmdet::` configs",
            'pip install "setuptools<81"',
        )


def check_extras(report: Report) -> None:
    """The optional extras, each installed or how to install it."""
    for extra, (purpose, distributions) in EXTRAS.items():
        missing = [name for name in distributions if not _version(name)]
        if missing:
            has = f"lacks {', '.join(missing)}" if len(missing) < len(distributions) else "is not installed"
            report.note(f'{extra} ({purpose}) {has}: pip install "mrla_mm[{extra}]", in a checkout ".[{extra}]"')
        else:
            report.ok(f"{extra} ({purpose}): {', '.join(f'{name} {_version(name)}' for name in distributions)}")


def check_ops(report: Report) -> None:
    """Which ops run, and whether each gives the right answer on the device that training would use."""
    try:
        importlib.import_module("mrla_mm")
        import mmcv.ops  # noqa: F401
    except Exception as error:
        spec = importlib.util.find_spec("mmcv._ext") if importlib.util.find_spec("mmcv") else None
        if spec is not None and spec.origin and Path(spec.origin).exists():
            remedy = f"{spec.origin} was built for another torch or Python: reinstall it, or replace mmcv by mmcv-lite"
        else:
            remedy = "repair the failures above first"
        report.fail(f"import mrla_mm or mmcv.ops: {_short(error)}", remedy)
        return
    ext = importlib.import_module("mrla_mm.compat.ext")
    if ext.is_stand_in():
        _count_ops(report, ext)
    else:
        report.ok(f"compiled mmcv._ext: {sys.modules['mmcv._ext'].__spec__.origin}")
    _try_ops(report, ext)


def _count_ops(report: Report, ext) -> None:
    names = _names_mmcv_asks_for()
    real, stubs = sorted(names & ext.OPS.keys()), sorted(names - ext.OPS.keys())
    report.ok(f"no compiled mmcv._ext: mrla_mm's stand-in has {len(real)} of its {len(names)} ops")
    if report.verbose:
        report.note(f"real: {', '.join(real)}")
        report.note(f"stubs, which raise when called: {', '.join(stubs)}")
    report.note(
        f"The other {len(stubs)} raise when called{'' if report.verbose else ' (--verbose names them)'}; for a "
        f"model that needs one: {ext.REMEDY}."
    )


def _try_ops(report: Report, ext) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, probe in PROBES.items():
        try:
            answer, expected = probe(torch, device)
            if not math.isclose(answer, expected, rel_tol=1e-4, abs_tol=1e-5):
                raise ArithmeticError(f"gives {answer} instead of {expected}")
            report.ok(f"{name} on {device}")
        except Exception as error:
            if name == "sigmoid_focal_loss" and device == "cpu" and not ext.is_stand_in():
                report.note(
                    "sigmoid_focal_loss: compiled mmcv has none for the CPU; mmdet computes it in Python there."
                )
            else:
                report.fail(
                    f"{name} on {device}: {_short(error)}", OTHERS["torchvision"] if ext.is_stand_in() else ext.REMEDY
                )


def check_checkpoints(report: Report) -> None:
    """Whether what mmengine saves can be loaded again."""
    import torch
    from mmengine.logging.history_buffer import HistoryBuffer

    from mrla_mm.compat import checkpoint

    file = io.BytesIO()
    torch.save({"log": HistoryBuffer([0.5], [1])}, file)
    file.seek(0)
    if torch.load(file)["log"].current() != 0.5:
        raise ArithmeticError("a log history changed its values on the way through a file")
    if checkpoint.restricted_by_default():
        report.ok("mmengine's checkpoints load with weights_only=True")
    else:
        report.note(f"torch {torch.__version__} executes code in checkpoints by default: load only files you trust.")


def check_configs(report: Report) -> None:
    """Whether both kinds of base config are found."""
    from mmengine.config import Config

    from mrla_mm.compat import config_scope

    path, _ = Config._get_cfg_path("mmdet::_base_/default_runtime.py", "")
    report.ok(f"mmdet:: configs in {Path(path).parents[1]}")
    count = len(list(config_scope.CONFIGS.rglob("*.py")))
    if count:
        report.ok(f"mrla_mm:: configs in {config_scope.CONFIGS} ({count})")
    else:
        report.fail(f"no configs in {config_scope.CONFIGS}", "reinstall mrla_mm: its configs are missing")


def check_weights(report: Report) -> None:
    """Which of the weight files that our configs start from are here already; nothing is fetched."""
    files = importlib.import_module("mrla_mm.weights.files")
    configs = importlib.import_module("mrla_mm.compat.config_scope").CONFIGS
    named = re.compile(r"checkpoint=[\"']((?:https?|torchvision)://[^\"']+)")
    found = {each for path in configs.rglob("*.py") for each in named.findall(path.read_text(encoding="utf-8"))}
    missing, locations = [], [*INHERITED, *sorted(found - set(INHERITED))]  # the README's first, as the example below
    for location in locations:
        path = files.cache_path(files.remote_url(location))
        if not path.is_file():
            missing.append(location)
            continue
        try:
            files.check_looks(path, str(path))
            report.ok(f"{location} is here: {path}")
        except ValueError as error:
            report.note(f"{location}: {error}")
    if missing:
        names = ", ".join(missing) if report.verbose else f"{missing[0]}, ...; --verbose names them"
        report.note(
            f"{len(missing)} of {len(locations)} are not here ({names}): a training fetches what its config names. To "
            'fetch one before, where there is a network: python -c "from mrla_mm.weights import read_checkpoint; '
            f"read_checkpoint('{missing[0]}')\""
        )
    report.note(f"They lie in {files.cache_path('x').parent}, where files may be copied to; TORCH_HOME moves it.")


def _import(report: Report, name: str, remedy: str):
    try:
        module = importlib.import_module(name)
    except Exception as error:
        report.fail(f"{name} does not import: {_short(error)}", remedy)
        return None
    report.ok(f"{name} {getattr(module, '__version__', None) or _version(name) or ''} ({_provider(name)})")
    return module


def _provider(name: str) -> str:
    return ", ".join(d for d in FAMILIES.get(name, (name,)) if _version(d)) or name


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _names_mmcv_asks_for() -> set[str]:
    """Every op that a module of mmcv.ops looks up when it is imported."""
    folder = Path(importlib.util.find_spec("mmcv.ops").origin).parent
    calls = re.compile(r"load_ext\(\s*'_ext',\s*\[(.*?)\]", re.DOTALL)
    lists = (match for file in folder.glob("*.py") for match in calls.findall(file.read_text(encoding="utf-8")))
    return {name for text in lists for name in re.findall(r"'(\w+)'", text)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
