"""Checks, before a run, that the weights a config asks for are there or can be fetched."""

import difflib
import os
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlparse

import torch
from mmengine.config import Config
from mmengine.runner.checkpoint import (
    get_deprecated_model_names,
    get_external_models,
    get_mmcls_models,
    get_torchvision_models,
)

from mrla_mm.errors import InputError

# The schemes of mmengine's checkpoint loader that stand for a table of URLs.
CATALOGUES = {
    "torchvision": get_torchvision_models,
    "modelzoo": get_torchvision_models,
    "open-mmlab": get_external_models,
    "openmmlab": get_external_models,
    "mmcls": get_mmcls_models,
}
TIMEOUT = 10.0  # seconds to wait for the first answer of a server


def check_weights(cfg: Config) -> None:
    """Check every weight file a config starts from, and warn of frozen layers that start from none.

    Raises:
        InputError: a file is missing, a name is unknown, or a URL is neither cached nor reachable; says what to do.
    """
    resuming = cfg.get("resume") and cfg.get("load_from")
    if cfg.get("load_from"):
        check_location(cfg.load_from, key="load_from", remedy="correct the path, or set load_from=None")
    found = list(pretrained_locations(cfg.get("model") or {}))
    if not resuming:
        for key, location in found:
            check_location(location, key=key, remedy=f"start without these weights: --cfg-options {key}=None")
    if not cfg.get("load_from"):
        warn_of_frozen_random_layers(cfg.get("model") or {})


def pretrained_locations(node: object, path: str = "model") -> Iterator[tuple[str, str]]:
    """Yield the dotted path of every `init_cfg` or `pretrained` of a model config that loads a file, and the file."""
    if isinstance(node, Mapping):
        if node.get("type") == "Pretrained" and node.get("checkpoint"):
            yield path, node["checkpoint"]
            return
        for key, value in node.items():
            if key == "pretrained" and isinstance(value, str):
                yield f"{path}.{key}", value
            else:
                yield from pretrained_locations(value, f"{path}.{key}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from pretrained_locations(value, f"{path}.{index}")


def check_location(location: str, *, key: str, remedy: str) -> None:
    """Raise InputError unless the weights at a path, URL or `catalogue://name` are there or can be fetched."""
    location = str(location)
    scheme, separator, name = location.partition("://")
    if not separator:
        check_file(Path(location).expanduser(), key=key, remedy=remedy)
    elif scheme in CATALOGUES:
        check_url(resolve(scheme, name, key=key), key=key, remedy=remedy)
    elif scheme in ("http", "https"):
        check_url(location, key=key, remedy=remedy)


def check_file(path: Path, *, key: str, remedy: str) -> None:
    """Raise InputError if a local weight file is missing or empty."""
    if not path.is_file():
        raise InputError(
            f"{key}: weights {path} do not exist; correct the path (it is seen from {Path.cwd()}), or {remedy}"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{key}: weights {path} are an empty file; fetch or train them again, or {remedy}")


def resolve(scheme: str, name: str, *, key: str) -> str:
    """Return the URL, or for a few names the file, behind `scheme://name`.

    Raises:
        InputError: the catalogue has no such name; the message has the nearest ones.
    """
    table = CATALOGUES[scheme]()
    if scheme in ("open-mmlab", "openmmlab"):
        name = get_deprecated_model_names().get(name, name)
    if name not in table:
        close = difflib.get_close_matches(name, table, n=3)
        raise InputError(
            f"{key}: {scheme}:// has no weights {name!r}; nearest: {', '.join(close) or sorted(table)[:5]}"
        )
    return table[name]


def cache_path(url: str) -> Path:
    """Return where torch.hub keeps the download of a URL."""
    return Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(urlparse(url).path)


def check_url(url: str, *, key: str, remedy: str) -> None:
    """Raise InputError if a URL is neither in the download cache nor answers."""
    cached = cache_path(url)
    if not url.startswith("http") or cached.is_file():
        return
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT):
            return
    except urllib.error.HTTPError as error:
        reason = f"the server answers {error.code} {error.reason}"
    except OSError as error:  # URLError, time-outs, refused and unresolved hosts
        reason = str(getattr(error, "reason", error))
    raise InputError(
        f"{key}: weights {url} cannot be fetched ({reason}). Download the file on a machine with network access and "
        f"put it at {cached}, or {remedy}"
    )


def warn_of_frozen_random_layers(model: Mapping) -> None:
    """Warn of a backbone with frozen stages or statistics and no pretrained weights: it would never learn."""
    backbone = model.get("backbone") or {}
    if any(pretrained_locations(model.get("backbone") or {}, "backbone")) or model.get("pretrained"):
        return
    frozen = []
    if backbone.get("frozen_stages", -1) >= 0:
        frozen.append(f"frozen_stages={backbone['frozen_stages']}")
    if backbone.get("norm_eval"):
        frozen.append("norm_eval=True")
    if frozen:
        warnings.warn(
            f"THE BACKBONE STARTS FROM RANDOM WEIGHTS, YET {' AND '.join(frozen)} KEEPS PART OF IT AS IT IS: these "
            "layers will never learn. Give pretrained weights (model.backbone.init_cfg or load_from), or train them: "
            "--cfg-options model.backbone.frozen_stages=-1 model.backbone.norm_eval=False",
            stacklevel=2,
        )
