"""``_base_ = 'mrla_mm::<config>.py'`` in config files, beside mmengine's ``package::`` names."""

import functools
from importlib.util import find_spec
from pathlib import Path

from mmengine.config import Config

from mrla_mm.errors import InputError


def find_config(name: str) -> Path:
    """Return the path of `package::name`; InputError if there is no such package."""
    package, _, relative = name.partition("::")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"config {name}: there is no installed package {package!r}")
    return Path(spec.submodule_search_locations[0], ".mim/configs", relative)


def install() -> None:
    """Make mmengine's ``_base_`` resolve ``mrla_mm::``; other names go to mmengine unchanged.

    Where pkg_resources is missing, which mmengine needs and setuptools 81 dropped, names of all
    packages are looked up here.
    """
    original = Config._get_cfg_path
    if hasattr(original, "knows_mrla_mm"):  # also where another plug-in has wrapped ours since
        return

    @functools.wraps(original)
    def get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
        package, separator, _ = cfg_path.partition("::")
        if package == "mrla_mm":
            return str(find_config(cfg_path)), None
        if separator and find_spec("pkg_resources") is None:
            return str(find_config(cfg_path)), package
        return original(cfg_path, filename)

    get_cfg_path.knows_mrla_mm = True
    Config._get_cfg_path = staticmethod(get_cfg_path)
