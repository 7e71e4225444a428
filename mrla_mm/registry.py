"""The registry of scope ``mrla_mm``: ``type="mrla_mm.CBAM"``, whoever else registers a CBAM.

The paper's backbones and variants are in mmengine's own, so that configs name them without a scope.
"""

import importlib
import warnings
from collections.abc import Callable

from mmengine.registry import MODELS as ROOT
from mmengine.registry import Registry

MODELS = Registry("model", parent=ROOT, scope="mrla_mm")


class ClassToImport:
    """A name in a registry whose module is imported once it is called or subclassed."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.__name__ = name

    def load(self) -> Callable:
        """Import the module and return what it has under the name: a class or a function."""
        return getattr(importlib.import_module(self.module), self.__name__)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Build an instance, or call the function."""
        return self.load()(*args, **kwargs)

    def __mro_entries__(self, bases: tuple) -> tuple[type]:
        return (self.load(),)


def register(host: Registry, name: str | None = None) -> Callable:
    """Decorate what a registry of mmengine's shall find by name, in place of what stood for it.

    Where another project has the name, theirs stays, and ours is found in the scope ``mrla_mm``.
    """

    def add(module: Callable) -> Callable:
        key = name or module.__name__
        theirs = host.module_dict.get(key)
        if theirs is None or theirs.__module__.partition(".")[0] == "mrla_mm":
            host.register_module(key, force=True, module=module)
            return module
        if "mrla_mm" not in host.children:
            Registry(host.name, parent=host, scope="mrla_mm")
        ours = host.children["mrla_mm"]
        if key not in ours.module_dict:
            told = f"{key} is registered by {theirs.__module__}; mrla_mm's is type='mrla_mm.{key}'"
            warnings.warn(told, stacklevel=2)
        ours.register_module(key, force=True, module=module)
        return module

    return add
