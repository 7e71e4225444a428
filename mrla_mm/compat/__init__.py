"""What lets mmdet run without compiled mmcv ops and with torch >= 2.6."""

import importlib.util
import sys
import types


def install() -> None:
    """Put every compatibility measure in place; calling it again changes nothing."""
    if importlib.util.find_spec("mmcv._ext") is None:
        module = types.ModuleType("mmcv._ext")
        module.__getattr__ = lambda name: None
        sys.modules["mmcv._ext"] = module
