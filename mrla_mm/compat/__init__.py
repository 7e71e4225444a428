"""Compatibility measures: mmdet without compiled mmcv ops, and with torch >= 2.6."""

from mrla_mm.compat import checkpoint, config_scope, ext
from mrla_mm.torch_support import add_safe_globals


def install() -> None:
    """Put every compatibility measure in place; calling it again changes nothing."""
    ext.install()
    add_safe_globals(checkpoint.allowed_types())
    config_scope.install()
