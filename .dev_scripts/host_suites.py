#!/usr/bin/env python
"""Run the hosts' own tests against this package: `python .dev_scripts/host_suites.py CHECKOUTS`.

CHECKOUTS has the sources of mmdetection, mmpretrain, mmcv, mmengine and timm, a folder each, at the
installed versions; pytest and parameterized are needed. Backbones become `WithLayerAttention` over
them, with branches that count from the start; those that it refuses stay. No assertion is touched.
With --plain nothing is exchanged: a test that fails then too is the host's own fault.
docs/suites.md has the counts.
"""

import argparse
import inspect
import os
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

TIMM_MODELS = """convnext_atto densenet121 edgenext_xx_small efficientnet_b0 ghostnet_050
    ghostnetv2_100 hgnetv2_b0 lcnet_050 mobilenetv3_small_050 mobilevit_xxs poolformer_s12 pvt_v2_b0
    regnety_008 repvgg_a0 resnet18 starnet_s050 swin_tiny_patch4_window7_224 twins_svt_small
    vit_tiny_patch16_224"""
TIMM_TESTS = ["test_model_forward", "test_model_forward_intermediates"]
OPS = ["roi_align", "nms", "focal_loss", "deform_conv", "modulated_deform_conv"]
SUITES = {  # a checkout and which of its tests
    "mmdet-backbones": ("mmdetection", ["test_models/test_backbones"]),
    "mmdet-detectors": ("mmdetection", ["test_models/test_detectors"]),
    "mmpretrain-backbones": ("mmpretrain", ["test_models/test_backbones"]),
    "mmcv-ops": ("mmcv", [f"test_ops/test_{name}.py" for name in OPS]),
    "mmengine": ("mmengine", ["test_registry", "test_config/test_config.py", "test_hooks"]),
    "timm": ("timm", ["test_models.py"]),  # TIMM_TESTS of TIMM_MODELS alone
}
built = Counter()


class Exchanged:
    """What stands for the class of a backbone, and builds it with layer attention."""

    def __init__(self, host):
        self.host = host

    def __getattr__(self, name):
        return getattr(self.host, name)

    def __mro_entries__(self, bases):
        return (self.host,)

    def __call__(self, *args, **kwargs):
        """Build it, or the plain backbone where layer attention is refused."""
        from mmengine.registry import MODELS

        from mrla_mm.errors import InputError

        named = dict(zip(inspect.signature(self.host).parameters, args, strict=False)) | kwargs
        ours = dict(type="WithLayerAttention", backbone=self.host, zero_init_attention=False)
        try:
            backbone = MODELS.build(ours | named)
        except InputError:
            built[f"{self.host.__name__} as it is"] += 1
            return self.host(*args, **kwargs)
        built["with layer attention"] += 1
        return backbone


def pytest_addoption(parser):
    """Tell the plug-in which checkout it is in."""
    parser.addoption("--checkout", type=Path)
    parser.addoption("--plain", action="store_true")


def pytest_configure(config):
    """Import the installed hosts, not those of the checkout, and exchange registered backbones."""
    checkout = config.getoption("checkout")
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != checkout]
    import mrla_mm  # noqa: F401

    testing = import_module("mmdet.testing._utils")
    testing._get_config_directory = lambda: str(checkout / "configs")
    config.exchanged = {}
    if config.getoption("plain"):
        return
    for package in ("mmdet", "mmpretrain"):
        import_module(f"{package}.models")
        registered = import_module(f"{package}.registry").MODELS.module_dict
        for name, kind in list(registered.items()):
            if kind.__module__.startswith(f"{package}.models.backbones"):
                registered[name] = config.exchanged[kind] = Exchanged(kind)


def pytest_collection_modifyitems(config, items):
    """Exchange the backbones that the tests have imported, and what makes timm's."""
    from mmpretrain.models.backbones import TIMMBackbone

    def create_model(name, **kwargs):
        return config.exchanged[TIMMBackbone](model_name=name, **kwargs).timm_model

    if config.getoption("checkout").name == "timm":
        chosen = {f"{test}[1-{model}]" for test in TIMM_TESTS for model in TIMM_MODELS.split()}
        items[:] = [item for item in items if item.name in chosen]
    for module in {item.module for item in items}:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in config.exchanged:
                setattr(module, name, config.exchanged[value])
        if config.exchanged and "create_model" in vars(module):
            module.create_model = create_model


def pytest_terminal_summary(terminalreporter):
    """Say how many backbones were built, and how."""
    told = ", ".join(f"{count} {how}" for how, count in built.most_common())
    terminalreporter.write_line(f"backbones: {told or 'none exchanged'}")


def main():
    """Run the chosen suites one after the other; the exit code is that of the worst."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    codes = []
    for suite in args.suites:
        folder, tests = SUITES[suite]
        checkout = (args.checkouts / folder).resolve()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "host_suites"]
        command += ["--checkout", checkout, *["--plain"] * args.plain]
        command += [f"tests/{test}" for test in tests]
        print(f"\n{suite}:", flush=True)
        run = subprocess.run(command, cwd=checkout, env=os.environ | dict(PYTHONPATH=search))
        codes.append(run.returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
