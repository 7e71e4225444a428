"""What lets mmdet run without compiled mmcv ops and with torch >= 2.6."""

from mrla_mm.compat import checkpoint, config_scope, ext

__all__ = ["checkpoint", "config_scope", "ext", "install"]


def install() -> None:
    """Put every compatibility measure in place; calling it again changes nothing."""
    ext.install()
    checkpoint.allow_mmengine_checkpoints()
    config_scope.install()
