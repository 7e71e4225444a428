"""Newer parts of torch, or what older releases have instead: the one place that asks.

The oldest torch that works throughout is 2.1.
"""

import codecs
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

_compiler = getattr(torch, "compiler", None)
# Dynamo knows these functions by identity, so they are not wrapped.
is_compiling = getattr(_compiler, "is_compiling", None) or torch._utils.is_compiling
is_dynamo_compiling = getattr(_compiler, "is_dynamo_compiling", None) or is_compiling
# Whether weights_only reads types allowed under a name of one's own choice; from then on it is
# torch.load's default.
has_named_safe_globals = hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
# Newer releases allow these two themselves: bytes of numpy's numbers, and a scheduler's milestones.
_ALLOWED = {"_codecs.encode": codecs.encode, "collections.Counter": Counter}


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for a type of device."""
    if hasattr(torch.amp, "is_autocast_available"):
        is_available = torch.amp.is_autocast_available(device_type)
        return is_available and torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def add_safe_globals(types: Sequence[tuple[object, str]]) -> None:
    """Let `load_weights_only` read these types and functions under these names from now on.

    Where torch has a list of them, `torch.load` reads them too.
    """
    if has_named_safe_globals:
        torch.serialization.add_safe_globals(list(types))
    _ALLOWED.update((name, allowed) for allowed, name in types)


def load_weights_only(path: str | Path, more: Sequence[type] = ()) -> object:
    """Load tensors, plain values and what is allowed onto the CPU, executing nothing else.

    Raises:
        UnpicklingError: the file asks for something else, which its message names.
    """
    if has_named_safe_globals:
        with torch.serialization.safe_globals(list(more)):
            return torch.load(path, map_location="cpu", weights_only=True)
    with open(path, "rb") as file:
        is_zip = torch.serialization._is_zipfile(file)
    if not is_zip:  # written before torch 1.6: weights alone
        return torch.load(path, map_location="cpu", weights_only=True)
    if torch.serialization._is_torchscript_zip(torch._C.PyTorchFileReader(str(path))):
        raise pickle.UnpicklingError("weights only: a class TorchScript is refused")
    allowed = torch._weights_only_unpickler._get_allowed_globals() | _ALLOWED
    allowed |= {f"{each.__module__}.{each.__qualname__}": each for each in more}

    class Unpickler(_RestrictedUnpickler):
        allowed_globals = allowed

    restricted = SimpleNamespace(Unpickler=Unpickler, __name__="restricted pickle")
    return torch.load(path, map_location="cpu", pickle_module=restricted, weights_only=False)


class _RestrictedUnpickler(pickle._Unpickler):
    """Finds what is allowed and nothing else, and leaves classes and functions as they are."""

    allowed_globals: Mapping[str, object]

    def find_class(self, module: str, name: str) -> object:
        key = f"{module}.{name}".replace("__builtin__", "builtins")  # Python 2's are saved
        if key not in self.allowed_globals:
            raise pickle.UnpicklingError(f"weights only: GLOBAL {key} is refused")
        return self.allowed_globals[key]

    def load_build(self) -> None:
        owner = self.stack[-2]  # below the state that it is to get
        if callable(owner):
            raise pickle.UnpicklingError(f"weights only: state of the class {owner} is refused")
        super().load_build()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}
