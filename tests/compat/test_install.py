import importlib
import pkgutil
import warnings

import pytest
from mmcv.utils.ext_loader import check_ops_exist, load_ext

from mrla_mm.compat.ext_ops import OPS

from ..conftest import ROOT, run_python
from .conftest import needs_stand_in

OPTIONAL = {"loguru", "onedl"}  # OneDL's mmdet imports them in two modules, not requiring them


@needs_stand_in
def test_an_unknown_op_raises_when_called_and_not_before():
    ext = load_ext("_ext", ["roi_pool_forward", "nms"])
    with pytest.raises(NotImplementedError, match="roi_pool_forward"):
        ext.roi_pool_forward(1, masked=2)
    assert ext.nms is OPS["nms"]


@needs_stand_in
def test_hosts_still_see_that_no_compiled_ops_are_installed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not check_ops_exist()  # OneDL's mmengine asks otherwise, and sees them
    from mmcv.ops import get_compiler_version

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


BESIDE_A_REAL_EXTENSION = """
import importlib, pathlib, sys, types, mmcv
root, folder = map(pathlib.Path, sys.argv[1:])
mmcv.__path__.append(str(folder))
sys.modules["mrla_mm"] = types.ModuleType("mrla_mm")  # its __init__ would import all of mmdet
sys.modules["mrla_mm"].__path__ = [str(root / "mrla_mm")]
from mrla_mm import compat

(folder / "_ext.py").write_text("raise ImportError('undefined symbol')")
compat.install()
try:
    import mmcv.ops
except ImportError as error:
    print(error)

(folder / "_ext.py").write_text("__getattr__ = lambda name: lambda *a, **k: 'the real ' + name")
importlib.invalidate_caches()
compat.install()
import mmcv.ops
print(sys.modules["mmcv.ops.nms"].ext_module.nms(), compat.ext.is_stand_in())
"""


@needs_stand_in
def test_a_real_extension_is_never_replaced_even_a_broken_one(tmp_path):
    said = run_python("-W", "ignore", "-B", "-c", BESIDE_A_REAL_EXTENSION, ROOT, tmp_path)
    assert said.splitlines() == ["undefined symbol", "the real nms False"]
