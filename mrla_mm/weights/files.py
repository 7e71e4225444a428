"""Weight files: fetched, looked at from outside, and read by torch's restricted unpickler, which executes nothing."""

import argparse
import difflib
import hashlib
import pickle
import re
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, get_local_rank
from mmengine.runner.checkpoint import (
    CheckpointLoader,
    get_deprecated_model_names,
    get_external_models,
    get_mmcls_models,
    get_torchvision_models,
)

from mrla_mm.errors import InputError
from mrla_mm.torch_support import has_named_safe_globals, safe_globals

CATALOGUES = {  # mmengine's schemes for tables of URLs
    "torchvision": get_torchvision_models,
    "modelzoo": get_torchvision_models,
    "open-mmlab": get_external_models,
    "openmmlab": get_external_models,
    "mmcls": get_mmcls_models,
}
# The naming convention of torchvision and OpenMMLab: at least eight digits of the SHA-256, which
# are not a date.
NAMED_DIGEST = re.compile(r"-(?!(?:19|20)\d{6}\.)([0-9a-f]{8,64})\.[a-z]+$")


def read_checkpoint(location: str | Path) -> Mapping:
    """Read the weights at a path, URL or `catalogue://name` onto the CPU; downloads go to torch.hub's cache.

    Other schemes of mmengine, such as s3://, are left to its backends.

    Raises:
        InputError: it is not there, cannot be fetched, is damaged, is not the file that its name's
            SHA-256 promises, or holds anything but tensors and plain values, of which nothing is
            executed.
    """
    scheme, separator, name = str(location).partition("://")
    url = from_catalogue(scheme, name) if separator and scheme in CATALOGUES else str(location)
    if url.startswith(("http://", "https://")):
        return read_url(url)
    if "://" in url:
        return CheckpointLoader.load_checkpoint(url, map_location="cpu")
    path = Path(url).expanduser()
    if not path.is_file():
        raise InputError(f"weights {path} are not a file (a relative path starts at {Path.cwd()})")
    return read_file(path)


def from_catalogue(scheme: str, name: str) -> str:
    """Return the URL behind `scheme://name`; InputError with the nearest names if the catalogue lacks it."""
    table, name = CATALOGUES[scheme](), get_deprecated_model_names().get(name, name)
    if name not in table:
        nearest = ", ".join(difflib.get_close_matches(name, table))
        raise InputError(f"{scheme}:// has no weights {name!r}; nearest: {nearest or 'none'}")
    return table[name]


def read_url(url: str) -> Mapping:
    """Read a URL through torch.hub's cache; one process of a machine fetches, and removes a bad download."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name
    try:
        if not path.is_file() and get_local_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path))
            try:
                read_file(path)
            except InputError:
                path.unlink()
                raise
    except (OSError, HTTPException) as error:  # of the network, the server, the proxy or the disk
        raise InputError(
            f"weights {url} cannot be fetched ({error}): get them elsewhere and put them at {path}"
        ) from error
    finally:
        barrier()
    return read_file(path)


def read_file(path: Path) -> Mapping:
    """Read a local checkpoint; `read_checkpoint` has what it raises."""
    with path.open("rb") as file:
        head = file.read(512).lstrip()
    for start, found in (
        (b"<", "a web page, of a login perhaps"),
        (b"version https://git-lfs", "a Git LFS pointer"),
    ):
        if head.startswith(start):
            raise InputError(f"weights {path} are {found}; get the file itself")
    named = NAMED_DIGEST.search(path.name)
    if named and not hashlib.sha256(path.read_bytes()).hexdigest().startswith(named[1]):
        raise InputError(
            f"weights {path} do not have the SHA-256 that their name promises; get the file again"
        )
    try:
        with safe_globals([argparse.Namespace]):  # a plain record that DeiT's training saves
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file can make the unpickler raise anything
        called = re.search(r"(?:GLOBAL|function|class) ([\w.]+)", str(error))
        if called is None or not isinstance(error, pickle.UnpicklingError):
            raise InputError(
                f"weights {path} are damaged or not a PyTorch checkpoint; get the file again"
            ) from error
        raise InputError(
            f"weights {path} hold more than weights: reading them would call {called[1]}. They were refused, nothing "
            "was executed. If you trust the file, load it where it comes from and save its state dict alone"
            + (
                ""
                if has_named_safe_globals
                else "; torch 2.6 and newer reads checkpoints of mmengine as they are"
            )
        ) from error
    if not isinstance(loaded, Mapping):
        raise InputError(f"weights {path} hold a {type(loaded).__name__}, not a state dict")
    return loaded
