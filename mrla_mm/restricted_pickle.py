"""A reader of weight files for torch before 2.6, which allows no types under names of our own."""

import pickle
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch


def load(path: str | Path, allowed: Mapping[str, object]) -> object:
    """Load a checkpoint, calling nothing but what torch allows itself and what `allowed` names.

    Raises UnpicklingError naming what else the file asks for.
    """
    if tarfile.is_tarfile(path):  # which torch before 2.6 reads unsafely (CVE-2025-32434)
        raise pickle.UnpicklingError("weights only: a tar file is refused")
    with open(path, "rb") as file:
        is_zip = torch.serialization._is_zipfile(file)
    if not is_zip:  # written before torch 1.6: weights alone
        return torch.load(path, map_location="cpu", weights_only=True)
    if torch.serialization._is_torchscript_zip(torch._C.PyTorchFileReader(str(path))):
        raise pickle.UnpicklingError("weights only: a class TorchScript is refused")
    theirs = torch._weights_only_unpickler._get_allowed_globals()

    class Unpickler(_RestrictedUnpickler):
        allowed_globals = theirs | _OF_NEWER_TORCH | dict(allowed)

    restricted = SimpleNamespace(Unpickler=Unpickler, __name__="restricted pickle")
    return torch.load(path, map_location="cpu", pickle_module=restricted, weights_only=False)


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for ``codecs.encode``, as which bytes are pickled."""
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError(f"weights only: the function encode to {encoding!r}")
    return text.encode(encoding)


# What newer releases allow themselves: bytes of numpy's numbers, and a scheduler's milestones.
_OF_NEWER_TORCH = {"_codecs.encode": _encode, "collections.Counter": Counter}


class _RestrictedUnpickler(pickle._Unpickler):
    """Finds and calls what is allowed and nothing else, and gives state to objects of it alone."""

    allowed_globals: Mapping[str, object]

    def find_class(self, module: str, name: str) -> object:
        key = f"{module}.{name}".replace("__builtin__", "builtins")  # Python 2's name
        if key not in self.allowed_globals:
            raise pickle.UnpicklingError(f"weights only: GLOBAL {key} is refused")
        return self.allowed_globals[key]

    def load_build(self) -> None:
        owner = self.stack[-2]  # below the state that it is to get
        if type(owner) not in self.allowed_globals.values():
            raise pickle.UnpicklingError(f"weights only: state of the class {owner} is refused")
        super().load_build()

    dispatch = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}
