"""The registry of scope ``mrla_mm``: ``type="mrla_mm.CBAM"``, whoever else registers a CBAM.

The paper's backbones and variants are in mmengine's own, so that configs name them without a scope.
"""

import warnings
from collections.abc import Callable

from mmengine.registry import MODELS as ROOT
from mmengine.registry import Registry

MODELS = Registry("model", parent=ROOT, scope="mrla_mm")


def register(host: Registry, name: str | None = None) -> Callable:
    """Decorate what a registry of mmengine's shall find by name.

    Where another project has the name, theirs stays, and ours is found in the scope ``mrla_mm``.
    """

    def add(module: Callable) -> Callable:
        key = name or module.__name__
        registry = host
        if key in host.module_dict:
            theirs = host.module_dict[key].__module__
            told = f"{key} is registered by {theirs}; mrla_mm's is type='mrla_mm.{key}'"
            warnings.warn(told, stacklevel=2)
            registry = host.children.get("mrla_mm")
            if registry is None:
                registry = Registry(host.name, parent=host, scope="mrla_mm")
        registry.register_module(key, module=module)
        return module

    return add
