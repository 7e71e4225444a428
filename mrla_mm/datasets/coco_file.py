"""A look into a COCO annotation file that tells what is wrong with it; large sound ones are not parsed."""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path

from mrla_mm.errors import InputError

PARSE_LIMIT = 64 * 2**20  # bytes; COCO's own training file has 450 MB, which takes a Python parser half a minute
KEYS = {"images": ("id", "file_name", "height", "width"), "annotations": ("id", "image_id", "category_id", "bbox")}
KEYS["categories"] = ("id", "name")


def read_annotations(path: Path, *, needed: Sequence[str] = tuple(KEYS)) -> dict:
    """Parse a COCO annotation file and check its structure.

    Raises:
        InputError: the file is no JSON, is cut off, or lacks keys that every COCO file has.
    """
    try:
        content = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        cut_off = error.pos >= len(error.doc) - 1 or error.msg.startswith("Unterminated string")
        reason = f"the file is cut off at character {len(error.doc)}" if cut_off else error
        raise InputError(f"annotation file {path} is not valid JSON ({reason}); copy or download it again") from None
    except UnicodeDecodeError as error:
        raise InputError(f"annotation file {path} is not a text file ({error}); copy or download it again") from None
    if not isinstance(content, dict):
        raise InputError(
            f"annotation file {path} holds a {type(content).__name__}, not COCO's object with {list(KEYS)}"
        )
    for key in needed:
        entries = content.get(key)
        if not isinstance(entries, list):
            raise InputError(f"annotation file {path} has no list {key!r}, which the COCO format demands")
        for number, entry in enumerate(entries):
            missing = [field for field in KEYS[key] if not isinstance(entry, dict) or field not in entry]
            if missing:
                raise InputError(
                    f"annotation file {path}: {key}[{number}] lacks {missing}, which the COCO format demands"
                )
    return content


def glance(path: Path) -> dict | None:
    """Return the `categories` of a large annotation file without parsing all of it, or None where it looks unusual."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        whole = view[:64].lstrip().startswith(b"{") and view[-64:].rstrip().endswith(b"}")
        if not whole or any(view.find(f'"{key}"'.encode()) < 0 for key in KEYS):
            return None
        at = view.rfind(b'"categories"')
        text = view[at + len('"categories"') : at + 2**22].decode("utf-8", errors="replace")
    try:
        categories, _ = json.JSONDecoder().raw_decode(text.lstrip(" \t\r\n:"))
    except json.JSONDecodeError:
        return None
    is_list = isinstance(categories, list) and all(isinstance(c, dict) and {"id", "name"} <= set(c) for c in categories)
    return {"categories": categories} if is_list else None


def load_annotations(path: Path, *, needed: Sequence[str] = tuple(KEYS)) -> dict:
    """Return the file's content, of a large and sound-looking one its categories alone.

    Raises:
        InputError: the file is missing, empty, unreadable or no COCO annotation file.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise InputError(f"annotation file {path} is empty; copy or download it again")
        quick = glance(path) if size > PARSE_LIMIT else None
        return quick or read_annotations(path, needed=needed)
    except OSError as error:
        raise InputError(f"annotation file {path} cannot be read: {error.strerror}") from None
