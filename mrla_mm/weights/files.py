"""Weight files: downloaded, checked, and read, by torch 2.6 and newer without executing code."""

import argparse
import os
import re
from collections.abc import Mapping
from functools import partial
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

import torch
from mmengine.dist import barrier, get_local_rank
from mmengine.runner.checkpoint import (
    CheckpointLoader,
    get_external_models,
    get_mmcls_models,
    get_torchvision_models,
)

from mrla_mm.errors import InputError, did_you_mean
from mrla_mm.torch_support import load_weights_only

CATALOGUES = {  # mmengine's schemes for tables of URLs
    "torchvision": get_torchvision_models,
    "modelzoo": get_torchvision_models,
    "open-mmlab": get_external_models,
    "openmmlab": get_external_models,
    "mmcls": get_mmcls_models,
}
# The naming convention of torchvision and OpenMMLab: at least eight digits of the SHA-256. Without
# a letter among them they may be a date or the number of a run.
NAMED_DIGEST = re.compile(r"-(?=\d*[a-f])([0-9a-f]{8,64})\.[a-z]+$")
SAFETENSORS = ".safetensors"
TRAIN_ALL = "frozen_stages=-1, norm_eval=False"  # where a backbone has these options


def read_checkpoint(location: str | Path) -> Mapping:
    """Read the weights at a path, URL or `catalogue://name` onto the CPU.

    Downloads go to torch.hub's cache. Other schemes, such as s3://, are mmengine's to read.

    Raises:
        InputError: it is not there, cannot be fetched, is damaged, is a download without the
            SHA-256 of its name, or holds anything but tensors and plain values, of which nothing
            is executed.
    """
    path = locate(location)
    if path is not None:
        return read_file(path)
    try:
        return CheckpointLoader.load_checkpoint(str(location), map_location="cpu")
    except Exception as error:  # of any of mmengine's backends
        reason = str(error).partition("\n")[0]
        raise InputError(f"weights {location} cannot be read by mmengine: {reason}") from error


def locate(location: str | Path) -> Path | None:
    """Return the local path of a weight file, fetched if need be; None for mmengine's backends."""
    url = str(location)
    scheme, _, name = url.partition("://")
    if scheme in CATALOGUES:
        catalogue = CATALOGUES[scheme]()
        if name not in catalogue:
            hint = did_you_mean(name, catalogue)
            raise InputError(f"weights {location}: {scheme}:// has no {name!r}{hint}")
        url = catalogue[name]
    if url.startswith(("http://", "https://")):
        return fetch(url)
    return None if "://" in url else Path(os.path.expanduser(url))


def fetch(url: str) -> Path:
    """Download into torch.hub's cache, as torch.hub and mmengine do, without reading the file."""
    path = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    digest = NAMED_DIGEST.search(path.name)
    try:
        if not path.is_file() and get_local_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), digest and digest[1])
    except (OSError, HTTPException, RuntimeError) as error:  # the last for another digest
        raise InputError(
            f"weights {url} cannot be fetched ({error}): get them elsewhere and put them at "
            f"{path}, or train from scratch: model.backbone.init_cfg=None, {TRAIN_ALL}"
        ) from error
    finally:
        barrier()
    return path


def read_file(path: Path) -> Mapping:
    """Read a local checkpoint; `read_checkpoint` has what it raises."""
    if not os.path.isfile(path):  # False for a name that is too long, where Path raises an error
        raise InputError(f"weights {path} are not a file (a relative path starts at {Path.cwd()})")
    read = partial(load_weights_only, more=[argparse.Namespace])  # DeiT's training saves one
    if path.suffix == SAFETENSORS:
        if find_spec("safetensors") is None:
            raise InputError(f"weights {path} need a package: pip install safetensors")
        from safetensors.torch import load_file

        read = load_file
    try:
        loaded = read(path)
    except Exception as error:  # a broken file can make the unpickler raise anything
        reason = str(error).partition("\n")[0].partition(". ")[0]
        called = re.search(r"(?:GLOBAL|function|class|attribute) '?([\w.]+)", str(error))
        if called:
            reason = f"reading them would call {called[1]}"
        raise InputError(
            f"weights {path} cannot be read ({reason}): the file is damaged or holds more than "
            "weights. If you trust it, save its state dict alone"
        ) from error
    if not isinstance(loaded, Mapping):
        raise InputError(f"weights {path} hold a {type(loaded).__name__}, not a state dict")
    return loaded
