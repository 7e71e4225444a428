"""The stand-in for mmcv's compiled operators, and what importing the package changes of others."""

import importlib
import json
import pkgutil

import pytest
from mmcv.utils.ext_loader import load_ext
from mmengine.optim import build_optim_wrapper
from torch import nn

from mrla_mm.compat.ext_ops import OPS

from ..conftest import run_python
from .conftest import needs_stand_in

OPTIONAL = {"loguru", "onedl"}  # OneDL's mmdet imports them in two modules, not requiring them


@needs_stand_in
def test_an_unknown_op_raises_when_called_and_not_before():
    ext = load_ext("_ext", ["roi_pool_forward", "nms"])
    with pytest.raises(NotImplementedError, match="roi_pool_forward"):
        ext.roi_pool_forward(1, masked=2)
    assert ext.nms is OPS["nms"]


@needs_stand_in
def test_mmengine_gives_offsets_of_convolutions_their_own_rate():
    from mmcv.ops import ModulatedDeformConv2dPack, get_compiler_version

    multiples = dict(bias_lr_mult=2.0, dcn_offset_lr_mult=0.1)
    cfg = dict(optimizer=dict(type="SGD", lr=1.0), paramwise_cfg=multiples)
    model = nn.Sequential(ModulatedDeformConv2dPack(4, 4, 3, bias=False))
    optimizer = build_optim_wrapper(model, cfg).optimizer
    assert [group["lr"] for group in optimizer.param_groups] == [1, 0.1, 0.1]
    assert "mrla_mm" in get_compiler_version()


def test_every_mmdet_model_and_mmcv_op_imports():
    failed = {}
    for package in ("mmcv.ops", "mmdet.models", "mmdet.datasets", "mmdet.evaluation"):
        folder = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(folder, package + "."):
            try:
                importlib.import_module(module.name)
            except Exception as error:
                if getattr(error, "name", None) not in OPTIONAL:
                    failed[module.name] = repr(error)
    assert not failed


BESIDE_A_BROKEN_EXTENSION = """
import sys
import mmcv
mmcv.__path__.append(sys.argv[1])
try:
    import mrla_mm
    import mmcv.ops
except ImportError as error:
    print(error)
"""


@needs_stand_in
def test_a_compiled_extension_is_never_replaced_even_a_broken_one(tmp_path):
    (tmp_path / "_ext.py").write_text("raise ImportError('undefined symbol')")
    said = run_python("-W", "ignore", "-c", BESIDE_A_BROKEN_EXTENSION, tmp_path)
    assert said == "undefined symbol\n"


BESIDE_ANOTHER_PROJECT = """
import warnings
from mmengine.registry import HOOKS, MODELS, init_default_scope

class Theirs:
    pass

def register(registry, name):
    registry.register_module(name, module=Theirs)

register(MODELS, "MLA")
register(MODELS, "MRLAViT")
register(HOOKS, "CompileBackboneHook")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import mrla_mm
register(MODELS, "DIA")
told = "".join(str(each.message) for each in caught)
for name in ("MLA", "MRLAViT", "CompileBackboneHook"):
    assert f"type='mrla_mm.{name}'" in told, name
assert issubclass(MODELS.get("MRLAResNet"), mrla_mm.weights.PretrainedBackbone)
assert HOOKS.get("CompileBackboneHook") is Theirs
assert HOOKS.get("mrla_mm.CompileBackboneHook") is mrla_mm.engine.CompileBackboneHook
init_default_scope("mmdet")
vit = MODELS.build(dict(type="mrla_mm.MRLAViT", arch="deit-tiny", layer_attention="mrla_mm.MLA"))
assert type(vit.layers[0].mrla.attention) is mrla_mm.attention.MLA
resnet = dict(type="mrla_mm.ComparatorResNet", depth=50, layer_attention="mrla_mm.DIA")
assert type(MODELS.build(resnet).layer1[0].mrla) is mrla_mm.comparators.DIA
for name in ("MLA", "MRLAViT", "DIA"):
    assert MODELS.get(name) is Theirs
"""


def test_another_project_may_have_modules_of_the_same_names():
    run_python("-c", BESIDE_ANOTHER_PROJECT)


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
try:
    import mrla_mm
except ModuleNotFoundError as error:
    print(error)
"""


def test_mmpretrain_may_be_missing():
    assert run_python("-W", "ignore", "-c", WITHOUT, "mmpretrain") == ""


@pytest.mark.parametrize("name", ["torch", "mmdet"])
def test_an_import_says_what_is_missing(name):
    said = run_python("-c", WITHOUT, name)
    assert name in said and "tools/doctor.py" in said


ALLOWED = {
    "mmengine.config.config.Config._get_cfg_path",  # the scope mrla_mm:: of config files
    "torch._weights_only_unpickler._marked_safe_globals_set",  # what checkpoints may hold
}
# An extension of the test's own lets mmdet be imported before the package.
COMPARE = """
import importlib, importlib.machinery, json, sys, types, warnings
warnings.simplefilter("ignore")
HOSTS = ("mmengine", "mmcv", "mmdet", "mmpretrain", "torch", "torchvision")
try:
    import mmcv._ext
except ImportError:
    ext = types.ModuleType("mmcv._ext")
    ext.__file__, ext.__getattr__ = "none", lambda name: print
    ext.__spec__ = importlib.machinery.ModuleSpec("mmcv._ext", None)
    sys.modules["mmcv._ext"] = ext
for name in (
    "mmdet.models mmdet.datasets mmdet.evaluation mmdet.engine mmpretrain.models mmpretrain.engine "
    "mmpretrain.datasets mmengine.runner mmengine._strategy mmengine.hooks"
).split():
    importlib.import_module(name)

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in HOSTS and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if key != "__warningregistry__":
                    found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    for each, part in vars(value).items():
                        found[name, f"{key}.{each}"] = part
    return found

before, modules = snapshot(), set(sys.modules)
import mrla_mm.backbones, mrla_mm.engine.layer_decay, mrla_mm.necks
changed = [
    f"{name}.{key}"
    for (name, key), value in snapshot().items()
    if name in modules and before.get((name, key)) is not value
    and not isinstance(value, types.ModuleType)
]
print(json.dumps(changed))
"""


def test_no_attribute_of_a_hosts_class_or_module_differs():
    changed = set(json.loads(run_python("-c", COMPARE).splitlines()[-1]))
    assert "mmengine.config.config.Config._get_cfg_path" in changed <= ALLOWED
