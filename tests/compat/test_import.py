"""Importing the package changes nothing of others but what is listed here."""

import json

from ..conftest import run_python

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
