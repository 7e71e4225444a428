"""A stand-in for ``mmcv._ext``, mmcv's compiled ops, for installations that have none (mmcv-lite).

``mmcv.ops`` looks every op up when it is imported and mmdet imports most of ``mmcv.ops``, so each
name must resolve. The ops in :data:`mrla_mm.compat.ext_ops.OPS` are real; any other name resolves
to a stub that raises when it is called.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable

NAME = "mmcv._ext"
REMEDY = (
    "install an mmcv with compiled ops that matches your torch (in place of mmcv-lite), "
    "or use a model without this op"
)


class StandIn(types.ModuleType):
    """The module that takes the place of ``mmcv._ext``."""

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):  # Python's own look-ups must not find an op
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        from mrla_mm.compat.ext_ops import OPS  # which takes torchvision and SciPy a second

        def missing(*args, **kwargs):
            problem = f"the mmcv op {name!r} exists only in compiled mmcv"
            raise NotImplementedError(f"{problem}: {REMEDY}")

        op = OPS.get(name, missing)
        setattr(self, name, op)
        return op


def is_stand_in() -> bool:
    """Whether ``mmcv._ext`` is the stand-in of this package."""
    return isinstance(sys.modules.get(NAME), StandIn)


def install() -> None:
    """Put the stand-in in place if no ``mmcv._ext`` exists; even a broken one is kept."""
    if importlib.util.find_spec(NAME) is not None:
        return
    module = StandIn(NAME, "Stand-in of mrla_mm for mmcv's compiled ops.")
    # with a loader, by which mmengine tells whether to look for deformable convolutions
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, __spec__.loader, origin=__name__)
    sys.modules[NAME] = module
    sys.modules["mmcv"]._ext = module
