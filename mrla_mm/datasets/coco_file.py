"""A look into a COCO annotation file that tells what is wrong with it; large sound ones are not parsed."""

import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrla_mm.arguments import is_number
from mrla_mm.errors import InputError

PARSE_LIMIT = 64 * 2**20  # bytes; COCO's own training file has 450 MB, which takes a Python parser half a minute
KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "bbox", "area"),
    "categories": ("id", "name"),
}


def read_annotations(path: Path, *, needed: Sequence[str] = tuple(KEYS)) -> dict:
    """Parse a COCO annotation file and check its structure.

    Raises:
        InputError: the file is no JSON, is cut off, or lacks keys that every COCO file has.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        if error.doc.startswith("\ufeff"):
            raise InputError(
                f"annotation file {path} begins with a byte order mark, which pycocotools does not read; save it as "
                "UTF-8 without one"
            ) from None
        cut_off = error.pos >= len(error.doc) - 1 or error.msg.startswith("Unterminated string")
        reason = f"the file is cut off at character {len(error.doc)}" if cut_off else error
        raise InputError(f"annotation file {path} is not valid JSON ({reason}); copy or download it again") from None
    except UnicodeDecodeError as error:
        raise InputError(f"annotation file {path} is not a text file ({error}); copy or download it again") from None
    if not isinstance(content, dict):
        raise InputError(
            f"annotation file {path} holds a {type(content).__name__}, not COCO's object with {list(KEYS)}"
        )
    for key in KEYS:
        if key not in needed and key not in content:
            continue
        if not isinstance(content.get(key), list):
            raise InputError(f"annotation file {path} has no list {key!r}, which the COCO format demands")
        check_entries(content[key], key, path)
    return content


def check_entries(entries: Sequence, key: str, path: Path) -> None:
    """Raise InputError naming the first entry of a list that mmdet or pycocotools could not use."""
    seen = set()
    for number, entry in enumerate(entries):
        missing = [field for field in KEYS[key] if not isinstance(entry, dict) or field not in entry]
        if missing:
            raise InputError(f"annotation file {path}: {key}[{number}] lacks {missing}, which the COCO format demands")
        if fault := fault_of(entry, key):
            raise InputError(f"annotation file {path}: {key}[{number}] has {fault}")
        for field in ("id", "name") if key == "categories" else ("id",):
            if (field, entry[field]) in seen:
                raise InputError(
                    f"annotation file {path}: two of its {key} have the {field} {entry[field]!r}; {field}s must differ"
                )
            seen.add((field, entry[field]))
    if len({type(entry["id"]) for entry in entries}) > 1:
        raise InputError(f"annotation file {path}: some ids of its {key} are numbers and some are text; use one kind")


def fault_of(entry: Mapping, key: str) -> str | None:
    """Return which value of an entry with all its keys is of a wrong kind, or None."""
    ids = [field for field in KEYS[key] if field.endswith("id")]
    if field := next((field for field in ids if not is_id(entry[field])), None):
        return f"{field}={entry[field]!r}, which is no id"
    if key == "categories" and not isinstance(entry["name"], str):
        return f"name={entry['name']!r}, which is no string"
    if key == "images":
        if not isinstance(entry["file_name"], str):
            return f"file_name={entry['file_name']!r}, which is no string"
        if not all(is_number(entry[side]) and entry[side] > 0 for side in ("width", "height")):
            return f"width={entry['width']!r} and height={entry['height']!r}; they are the image's pixels"
    if key == "annotations":
        bbox = entry["bbox"]
        if not (isinstance(bbox, list) and len(bbox) == 4 and all(map(is_number, bbox))):
            return f"bbox={bbox!r}; it must be [x, y, width, height] in pixels"
        if not is_number(entry["area"]):
            return f"area={entry['area']!r}; it must be a number of pixels"
        for flag in ("iscrowd", "ignore"):
            if entry.get(flag, 0) not in (0, 1):
                return f"{flag}={entry[flag]!r}; it must be 0 or 1"
    return None


def is_id(value: object) -> bool:
    """Whether a JSON value can number an entry."""
    return isinstance(value, int | str) and not isinstance(value, bool)


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
