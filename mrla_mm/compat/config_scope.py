"""``_base_ = 'mrla_mm::<config>.py'`` in config files, beside the ``package::`` names that mmengine knows itself."""

import difflib
import functools
from pathlib import Path

from mmengine.config import Config

from mrla_mm.errors import InputError

PREFIX = "mrla_mm::"
CONFIGS = Path(__file__).resolve().parents[1] / ".mim" / "configs"  # a link in a checkout, files in a wheel


def config_path(name: str) -> str:
    """Return the file of a config of this package, for example ``retinanet_r50_mrla_light_1x.py``.

    Args:
        name: path below the configs folder, with or without the prefix ``mrla_mm::`` and the suffix ``.py``.

    Raises:
        InputError: there is no such config; the message lists the ones that come closest.
    """
    relative = name.removeprefix(PREFIX).removesuffix(".py") + ".py"
    if (CONFIGS / relative).is_file():
        return str(CONFIGS / relative)
    known = [path.relative_to(CONFIGS).as_posix() for path in sorted(CONFIGS.rglob("*.py"))]
    close = difflib.get_close_matches(relative, known, n=5, cutoff=0.4)
    hint = " or ".join(PREFIX + match for match in close) or f"one of the {len(known)} in {CONFIGS}"
    raise InputError(f"no config named {name!r} in mrla_mm; did you mean {hint}")


def install() -> None:
    """Teach mmengine's ``_base_`` the scope ``mrla_mm::``; every other name goes to mmengine unchanged.

    An entry in mmengine's table of packages would not do: it looks for the metadata of an installed distribution,
    which a checkout lacks and an editable install has elsewhere, and gives the configs a ``_scope_`` without registry.
    """
    original = Config._get_cfg_path
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
        return (config_path(cfg_path), None) if cfg_path.startswith(PREFIX) else original(cfg_path, filename)

    Config._get_cfg_path = staticmethod(get_cfg_path)
