"""Weight files: where a location leads, fetching what is not here yet, and reading without executing what is inside.

A file is looked at from outside first (a web page, a cut-off archive, a SHA-256 that differs), then torch's restricted
unpickler reads it, always: tensors and plain values, no code.
"""

import argparse
import contextlib
import difflib
import hashlib
import http.client
import os
import pickle
import re
import urllib.error
import urllib.request
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse

import torch
from mmengine.runner.checkpoint import (
    CheckpointLoader,
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
TIMEOUT = 10.0  # seconds to wait for a server
CHUNK = 1 << 20
# The naming convention of torchvision and OpenMMLab: at least eight digits of the SHA-256 before the suffix.
NAMED_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.[a-z]+$")
DATE = re.compile(r"(19|20)\d{6}")


def read_checkpoint(location: str | Path) -> Mapping:
    """Read the weights at a path, URL or `catalogue://name` onto the CPU; fetch and cache what lies elsewhere.

    Other schemes of mmengine (s3:// and its kin) are left to its backends.

    Raises:
        InputError: it is not there, cannot be fetched, is damaged, is not the file its SHA-256 promises, or holds
            anything but tensors and plain values, of which nothing was executed.
    """
    location = str(location)
    path = local_path(location)
    if path is None:
        try:
            return mapping_of(CheckpointLoader.load_checkpoint(location, map_location="cpu"), location)
        except (OSError, ImportError) as error:
            raise InputError(f"weights {location} cannot be read: {error}") from error
    if not path.is_file():
        fetch(remote_url(location), path)
    return read_file(path)


def remote_url(location: str) -> str | None:
    """Return the URL behind a location; None for a path and for schemes that mmengine's backends serve."""
    scheme, separator, name = location.partition("://")
    if scheme in CATALOGUES and separator:
        target = resolve(scheme, name)
        return target if "://" in target else None
    return location if scheme in ("http", "https") else None


def local_path(location: str) -> Path | None:
    """Return where the weights at a location lie or will lie once fetched; None if a backend of mmengine reads them.

    Raises:
        InputError: a local file does not exist or is a folder, or a catalogue has no such name.
    """
    scheme, separator, name = location.partition("://")
    if not separator:
        path = Path(location).expanduser()
        if path.is_dir():
            raise InputError(f"weights {path} are a folder; name a file")
        if not path.is_file():
            raise InputError(f"weights {path} do not exist; correct the path (it is seen from {Path.cwd()})")
        return path
    if scheme in CATALOGUES:
        target = resolve(scheme, name)
        return cache_path(target) if "://" in target else Path(target)
    return cache_path(location) if scheme in ("http", "https") else None


def resolve(scheme: str, name: str) -> str:
    """Return the URL, or for a few names the file, behind `scheme://name`.

    Raises:
        InputError: the catalogue has no such name; the message has the nearest ones.
    """
    table = CATALOGUES[scheme]()
    if scheme in ("open-mmlab", "openmmlab"):
        name = get_deprecated_model_names().get(name, name)
    if name not in table:
        close = difflib.get_close_matches(name, table, n=3)
        raise InputError(f"{scheme}:// has no weights {name!r}; nearest: {', '.join(close) or sorted(table)[:5]}")
    return table[name]


def cache_path(url: str) -> Path:
    """Return where torch.hub keeps the download of a URL."""
    return Path(torch.hub.get_dir()) / "checkpoints" / os.path.basename(urlparse(url).path)


def fetch(url: str, target: Path) -> None:
    """Download a URL to a file, which appears only if it arrived whole and is weights.

    Raises:
        InputError: the server cannot be reached or refuses, the connection ends early, or the file is no checkpoint.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        download(url, part, target)
        read_file(part, name=target.name, shown=url)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def download(url: str, part: Path, target: Path) -> None:
    """Write what a URL holds to a file, in which a part may be left; messages name the target it is for.

    Raises:
        InputError: the server cannot be reached, refuses or speaks no HTTP, or the connection ends early.
    """
    advice = f"Download the file on a machine with network access and put it at {target}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, part.open("xb") as file:
            print(f"Downloading {url} to {target}", flush=True)  # noqa: T201  minutes may pass, with no logger yet
            size = sum(file.write(chunk) for chunk in iter(lambda: answer.read(CHUNK), b""))
            promised = answer.headers.get("Content-Length")
    except urllib.error.HTTPError as error:
        raise unreachable(url, f"the server answers {error.code} {error.reason}", advice) from error
    except (http.client.InvalidURL, UnicodeError) as error:
        raise InputError(f"weights {url} cannot be fetched: the URL is malformed ({error}); correct it") from error
    except OSError as error:  # URLError, time-outs, refused and unresolved hosts
        raise unreachable(url, str(getattr(error, "reason", error)), advice) from error
    except http.client.HTTPException as error:  # of proxies and servers that end in the middle of a chunk
        raise unreachable(url, f"the answer is no whole one of HTTP: {type(error).__name__}", advice) from error
    if promised is not None and size != int(promised):
        raise unreachable(url, f"the connection ended after {size} of {promised} bytes", advice)


def unreachable(url: str, reason: str, advice: str) -> InputError:
    """Return the error for a URL whose file did not arrive."""
    return InputError(f"weights {url} cannot be fetched ({reason}). {advice}")


def read_file(path: Path, *, name: str | None = None, shown: str | None = None) -> Mapping:
    """Read a local checkpoint after looking at it from outside; `read_checkpoint` has what it raises.

    Args:
        path: the file.
        name: the name that may promise its SHA-256, the file's own by default.
        shown: how messages call it, its path by default.
    """
    shown = shown or str(path)
    check_looks(path, shown)
    check_digest(path, name or path.name, shown)
    try:
        with namespaces_allowed():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(refused(shown, str(error))) from error
    except Exception as error:  # a broken file can make the unpickler raise anything
        reason = str(error) if " " in str(error) else f"{type(error).__name__} {error}"  # often a bare byte
        raise InputError(damaged(shown, reason)) from error
    return mapping_of(content, shown)


def check_looks(path: Path, shown: str) -> None:
    """Raise InputError for an empty file, a web page, a Git LFS pointer and an archive without its end."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        raise InputError(f"weights {shown} are an empty file; fetch or train them again")
    if head.lstrip()[:1] == b"<":
        text = " ".join(head.decode("utf-8", "replace").split())[:60]
        raise InputError(
            f"weights {shown} are a web page, not a checkpoint (it begins {text!r}): a log-in or error page was saved "
            "under the file's name. Open the address in a browser, download the file itself"
        )
    if head.startswith(b"version https://git-lfs"):
        raise InputError(f"weights {shown} are a Git LFS pointer, not the file; run git lfs pull in its repository")
    if head.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise InputError(
            f"weights {shown} are cut off: the archive has no end ({path.stat().st_size} bytes are there). Copy or "
            "download the file again, or take an earlier checkpoint"
        )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def sidecar_of(path: Path) -> Path:
    """Return the file beside a checkpoint that holds its SHA-256, in the format of sha256sum."""
    return path.with_name(f"{path.name}.sha256")


def check_digest(path: Path, name: str, shown: str) -> None:
    """Raise InputError if a file is not the one whose SHA-256 its sidecar or its name has."""
    promises = {}
    named = NAMED_DIGEST.search(name)
    if named and not DATE.fullmatch(named[1]):
        promises["its name"] = named[1]
    sidecar = sidecar_of(path)
    if sidecar.is_file():
        words = sidecar.read_text(encoding="utf-8", errors="replace").split()
        promises[str(sidecar)] = words[0].lower() if words else "nothing"
    actual = digest_of(path) if promises else ""
    for where, promised in promises.items():
        if not actual.startswith(promised):
            raise InputError(
                f"weights {shown} are not what they should be: their SHA-256 begins {actual[: len(promised)][:16]}, "
                f"{where} says {promised[:16]}. Get the file again; if the name never meant a hash, rename the file"
            )


def namespaces_allowed() -> contextlib.AbstractContextManager:
    """Allow argparse.Namespace, a plain record that DeiT's training script saves, while a file is read."""
    allow = getattr(torch.serialization, "safe_globals", None)
    return contextlib.nullcontext() if allow is None else allow([argparse.Namespace])


def refused(shown: str, error: str) -> str:
    """Return the message for a file that torch's restricted unpickler refuses."""
    found = re.search(r"(?:GLOBAL|function) ([\w.]+)", error)
    if found is None:
        return damaged(shown, error.rpartition("WeightsUnpickler error:")[2].partition("Check the")[0])
    return (
        f"weights {shown} hold more than weights: reading them would call {found[1]}. They were refused, nothing was "
        "executed. If you trust where the file comes from, load it there and save its state dict alone "
        f"(this is torch {torch.__version__}; mmengine's training checkpoints need 2.6 or newer)"
    )


def damaged(shown: str, reason: str) -> str:
    """Return the message for a file that cannot be unpickled."""
    return (
        f"weights {shown} are damaged or no PyTorch checkpoint ({' '.join(reason.split())[:120]}); get the file again"
    )


def mapping_of(content: object, shown: str) -> Mapping:
    """Return the content of a checkpoint if it is a mapping.

    Raises:
        InputError: it is not.
    """
    if not isinstance(content, Mapping):
        raise InputError(f"weights {shown} hold a {type(content).__name__}, not a state dict")
    return content
