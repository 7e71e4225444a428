#!/usr/bin/env python
"""Run the same tests on every stack that the package promises, each in a clean environment.

`python .dev_scripts/matrix.py` makes the environments with uv below OUT, one after the other, runs
the tests there and removes each again: 6 GB of disk at a time. Results go to OUT/<stack>.json,
output to OUT/<stack>.log, and the table of all results in OUT is printed. What has to be compiled,
for 10 to 50 minutes on two cores, stays as a wheel in OUT/wheels-<stack>; a wheel put there before
is used.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import NamedTuple

from mrla_mm import cli
from mrla_mm.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("test_functional.py", "attention", "backbones", "compat", "weights", "test_smoke.py")
TESTS = [f"tests/{name}" for name in FOLDERS]
TEST_TOOLS = ("pytest", "pytest-xdist", "timm")
WITHOUT_MMCV = ("mmengine==0.10.7", "mmdet==3.3.0", "mmpretrain==1.2.0")
OPENMMLAB = (*WITHOUT_MMCV, "mmcv-lite==2.1.0")
ONEDL = ("onedl-mmengine==0.10.12", "onedl-mmdetection==3.5.1", "onedl-mmpretrain==1.3.6")
ONEDL_TORCH = ("torch==2.11.0", "torchvision==0.26.0")
ONEDL_MMCV = "onedl-mmcv==2.3.6"
SHARED = ("pycocotools", "opencv-python", "matplotlib", "setuptools", "wheel")
NUMPY_1 = ("numpy==1.26.4", "opencv-python<4.12")  # torch below 2.3 was compiled against it
SHOWN = ["torch", "torchvision", "numpy", "mmcv"]
SHOWN += [name.split("==")[0] for name in (*OPENMMLAB, *ONEDL, ONEDL_MMCV)]


class Stack(NamedTuple):
    """A Python version, the arguments of the install command, and what is compiled after it."""

    python: str
    packages: tuple[str, ...]
    compiled: str = ""
    installer: str = "uv"


def locked(python):
    """Return the stack of the lock file, installed as `make install` does it."""
    return Stack(python, ("--require-hashes", "-r", "requirements/lock.txt"), installer="pip")


def with_torch(python, torch, torchvision, *more):
    """Return OpenMMLab's packages on another torch."""
    packages = (f"torch=={torch}", f"torchvision=={torchvision}", *OPENMMLAB, *SHARED, *more)
    return Stack(python, packages)


STACKS = {
    "lock-py310": locked("3.10"),
    "lock-py311": locked("3.11"),
    "lock-py312": locked("3.12"),
    "lock-py313": locked("3.13"),
    "torch-oldest": with_torch("3.10", "2.1.2", "0.16.2", *NUMPY_1),
    "torch-2.6": with_torch("3.10", "2.6.0", "0.21.0"),  # the first with weights_only=True
    "torch-newest": with_torch("3.12", "2.15.0", "0.29.2"),
    "classic": Stack(
        "3.10",
        ("torch==2.1.2", "torchvision==0.16.2", *SHARED, *NUMPY_1, *WITHOUT_MMCV, "setuptools<81"),
        "mmcv==2.1.0",
    ),
    "onedl": Stack("3.11", (*ONEDL_TORCH, "ninja", *SHARED, *ONEDL), ONEDL_MMCV),
    # Where pip builds onedl-mmcv apart from torch, as it does by default, it has no operators.
    "onedl-lite": Stack("3.11", (*ONEDL_TORCH, *SHARED, *ONEDL, ONEDL_MMCV)),
}


def parse_args(argv):
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="matrix.py", description=__doc__, formatter_class=raw)
    parser.add_argument("stacks", nargs="*", metavar="STACK", help="stacks to run (default: all)")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/matrix"))
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stacks if name not in STACKS]:
        raise InputError(f"stack {unknown[0]!r} is unknown; there are {', '.join(STACKS)}")
    return args


def call(command, log, **variables):
    """Run a command from the repository with its output in the log; return the exit code."""
    env = os.environ | variables
    for name in ("VIRTUAL_ENV", "PYTHONPATH"):
        env.pop(name, None)
    with log.open("a") as file:
        file.write(f"$ {' '.join(map(str, command))}\n")
        file.flush()
        return subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, env=env).returncode


def install(name, env, folder, log):
    """Make a stack's environment; return the first command that failed, or None."""
    stack = STACKS[name]
    uv = Path(sys.executable).with_name("uv")  # `make matrix` installs it
    python = env / "bin/python"
    installers = {
        "uv": (uv, "pip", "install", "--quiet", "--python", python),
        "pip": (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
    }
    compiled = []
    if stack.compiled:
        wheels = folder / f"wheels-{name}"
        if not any(wheels.glob("*.whl")):
            # The registry's wheel, if there is one, is of another torch or has no operators.
            source = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation")
            compiled.append((python, "-m", "pip", "wheel", *source, "-w", wheels, stack.compiled))
        compiled.append((*installers["uv"], "--find-links", wheels, stack.compiled))
    commands = [
        (uv, "venv", "--quiet", "--clear", "--seed", "--python", stack.python, env),
        (*installers[stack.installer], *stack.packages),
        *compiled,
        (*installers["uv"], *TEST_TOOLS),
        (*installers["uv"], "--no-deps", "--no-build-isolation", "--editable", "."),
    ]
    return next((command for command in commands if call(command, log) != 0), None)


def versions(env):
    """Return the installed versions of the packages that make a stack."""
    code = """
import importlib.metadata as m, json, platform
have = {d.metadata["Name"].lower(): d.version for d in m.distributions()}
print(json.dumps({"python": platform.python_version(), **have}))
"""
    found = json.loads(subprocess.check_output([env / "bin/python", "-c", code]))
    return {name: found[name] for name in ("python", *SHOWN) if name in found}


def run_stack(name, args):
    """Install a stack, run the tests on it and write the result; return whether all passed."""
    folder = args.out.resolve()
    env = folder / f"env-{name}"
    log = folder / f"{name}.log"
    folder.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    result = dict(stack=name, date=str(date.today()))
    passed = False
    if failed := install(name, env, folder, log):
        result["tests"] = f"failed: {' '.join(map(str, failed))}"
    else:
        options = ["-q", "-m", "not slow", "-n", "2", "--dist", "worksteal"]
        command = [env / "bin/python", "-m", "pytest", *options, *TESTS]
        passed = call(command, log, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE") == 0
        result |= dict(versions=versions(env), tests=log.read_text().splitlines()[-1].strip("= "))
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    shutil.rmtree(env, ignore_errors=True)
    print(f"{name}: {result['tests']}; {log}", flush=True)
    return passed


def table(folder):
    """Return all results in a folder as a Markdown table."""
    lines = ["| stack | versions | tests | date |", "|---|---|---|---|"]
    for path in (folder / f"{name}.json" for name in STACKS):
        if path.is_file():
            found = json.loads(path.read_text())
            parts = ", ".join(f"{key} {value}" for key, value in found.get("versions", {}).items())
            lines.append(f"| {found['stack']} | {parts} | {found['tests']} | {found['date']} |")
    return "\n".join(lines)


def main(argv=None):
    """Run the stacks of the given command line.

    Raises:
        InputError: a stack did not install, or a test failed on it.
    """
    args = parse_args(argv)
    failed = [name for name in args.stacks or STACKS if not run_stack(name, args)]
    print(table(args.out))
    if failed:
        raise InputError(f"{', '.join(failed)} did not pass; the logs in {args.out} say why")


if __name__ == "__main__":
    sys.exit(cli.run(main))
