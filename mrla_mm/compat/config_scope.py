"""``_base_ = 'mrla_mm::<config>.py'`` in config files, beside the ``package::`` names that mmengine knows itself."""

import difflib
import functools
import importlib.util
from pathlib import Path

from mmengine.config import Config

from mrla_mm.errors import InputError

PREFIX = "mrla_mm::"
CONFIGS = Path(__file__).resolve().parents[1] / ".mim" / "configs"  # links in a checkout, files in a wheel


def config_path(name: str) -> str:
    """The file of a config of this package, for example ``retinanet_r50_mrla_light_1x.py``.

    Args:
        name: path below the configs folder, with or without the prefix ``mrla_mm::`` and the suffix ``.py``.

    Raises:
        InputError: there is no such config; the message lists the ones that come closest.
    """
    relative = name.removeprefix(PREFIX).removesuffix(".py") + ".py"
    known = {path.relative_to(CONFIGS).as_posix(): path for path in sorted(CONFIGS.rglob("*.py"))}
    if relative in known:
        return str(known[relative])
    close = difflib.get_close_matches(relative, known, n=5, cutoff=0.4)
    if close:
        hint = "did you mean " + " or ".join(PREFIX + match for match in close)
    else:
        hint = f"there are {len(known)} configs in {CONFIGS}"
    raise InputError(f"no config named {name!r} in mrla_mm: {hint}")


def install() -> None:
    """Teach mmengine's ``_base_`` the scope ``mrla_mm::``; every other name goes to mmengine unchanged.

    mmengine knows its own family of packages only. The configs carry no ``_scope_``: what this package registers is
    in the root registry, and their own ``mmdet::`` bases bring the scope they need.
    """
    if not hasattr(Config._get_cfg_path, "__wrapped__"):
        Config._get_cfg_path = staticmethod(_with_own_scope(Config._get_cfg_path))


def _with_own_scope(original):
    @functools.cache  # mmengine reads every metafile of the package to find one config, a quarter of a second
    def in_package(cfg_path: str) -> tuple[str, str | None]:
        return original(cfg_path, "")

    @functools.wraps(original)
    def get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
        if cfg_path.startswith(PREFIX):
            return config_path(cfg_path), None
        if "::" not in cfg_path:
            return original(cfg_path, filename)
        if importlib.util.find_spec("pkg_resources") is None:
            raise InputError(
                f"the base config {cfg_path!r} cannot be looked up: mmengine needs pkg_resources, "
                'which setuptools 81 dropped; run `pip install "setuptools<81"`'
            )
        return in_package(cfg_path)

    return get_cfg_path
