#!/usr/bin/env python
"""List the licence of every package of the lock files from its installed metadata, and flag what is not permissive.

`make licenses` installs both lock files and writes docs/licenses.md; without --out the list is printed. A licence whose
text no rule knows, or a flagged one that REASONS does not explain, ends with an error.
"""

import argparse
import importlib.metadata
import re
import sys
from pathlib import Path

from mrla_mm import cli
from mrla_mm.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements/lock.txt", "requirements/dev.txt")
PERMISSIVE = (
    r"MIT|Expat|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|CMU|Unlicense|zlib|CC0|BlueOak|Boost|public domain"
)
FLAGGED = {  # what the text says: what it is called here
    r"\bA?GPL|(?<!Lesser )General Public": "copyleft",
    r"LGPL|Lesser General Public": "weak copyleft",
    r"MPL|Mozilla": "weak copyleft",
    r"NVIDIA|Proprietary": "proprietary",
}
STATED = {"cuda-toolkit": "NVIDIA (a package without files, which names others)"}  # those with no metadata of it
REASONS = {  # why a flagged package may be depended on, and how
    "weak copyleft": "it covers the package's own files; the package is installed as it is, not changed, not shipped",
    "proprietary": "CUDA libraries that torch's Linux wheels require, under NVIDIA's licence; a torch built for the "
    "CPU does not install them",
    "copyleft": "used for development alone, neither imported by the package nor shipped with it",
}
BUNDLED = """A wheel may carry libraries under licences of their own beside its code: opencv-python FFmpeg and Qt (LGPL),
shapely GEOS (LGPL-2.1), numpy and scipy GCC's runtime (GPL-3.0 with its exception) and libquadmath (LGPL-2.1).
None of them is shipped with this package."""


def names_of(lock):
    """Return the packages of a lock file and the marker of each, or an empty string."""
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([A-Za-z0-9_.-]+)==[^ ;\\]+(?: *; *([^\\]*))?", line) for line in lines)
    return {match[1]: (match[2] or "").strip() for match in found if match}


def license_of(name):
    """Return what a package says of its licence: the SPDX expression, a short text, its classifiers, or its file."""
    metadata = importlib.metadata.metadata(name)
    if name in STATED:
        return STATED[name]
    text = (metadata.get("License-Expression") or metadata.get("License") or "").strip()
    classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    if text and "\n" not in text and len(text) < 80 and text.upper() != "UNKNOWN":
        return text
    if classifiers:
        return ", ".join(c for c in classifiers if c != "OSI Approved") or classifiers[0]
    if text and text.upper() != "UNKNOWN":
        return text.splitlines()[0]
    for file in importlib.metadata.files(name) or ():
        if re.search(r"licen[cs]e|copying", file.name, re.IGNORECASE) and file.locate().is_file():
            words = file.locate().read_text(encoding="utf-8", errors="replace")[:2000]
            found = re.search(
                r"(Apache License|MIT License|BSD|Permission is hereby granted|Redistribution and use)", words
            )
            named = {"Permission is hereby": "MIT", "Redistribution and use": "BSD"}
            return f"{named.get(found[1], found[1])} (from {file.name})" if found else "unknown"
    return "unknown"


def verdict(text):
    """Return what a licence is: permissive, one of REASONS, or unknown. Of a choice, the permissive counts."""
    chosen = [part for part in re.split(r"\bOR\b|/", text) if re.search(PERMISSIVE, part, re.IGNORECASE)]
    if chosen and re.search(r"\bOR\b", text):
        return "permissive"
    for pattern, kind in FLAGGED.items():
        if re.search(pattern, text):
            return kind
    return "permissive" if re.search(PERMISSIVE, text, re.IGNORECASE) else "unknown"


def rows_of(lock):
    """Return (package, version, licence, verdict) of each package of a lock file; those not installed here say why."""
    rows = []
    for name, marker in names_of(lock).items():
        try:
            text = license_of(name)
            rows.append((name, importlib.metadata.version(name), text, verdict(text)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "-", f"not installed here: {marker or 'missing'}", "not installed"))
    return rows


def page(tables):
    """Return the page: a table per lock file, and the reasons of what is flagged."""
    kinds = [kind for kind in REASONS if any(row[3] == kind for rows in tables.values() for row in rows)]
    lines = ["# Licences", ""]
    lines += [
        "Of every package that the lock files name, as its own metadata states it; written by `make licenses`.",
        "",
    ]
    lines += [f"- **{kind}**: {REASONS[kind]}." for kind in kinds]
    lines += ["", BUNDLED]
    for lock, rows in tables.items():
        lines += ["", f"## {lock}", "", "| package | version | licence | |", "|---|---|---|---|"]
        lines += [f"| {name} | {version} | {text.replace('|', '/')} | {kind} |" for name, version, text, kind in rows]
    return "\n".join(lines) + "\n"


def main(argv=None):
    """List with the given command line."""
    parser = argparse.ArgumentParser(prog="licenses.py", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to write (default: print)")
    args = parser.parse_args(argv)
    tables = {lock: rows_of(lock) for lock in LOCKS}
    running = {row[0] for row in tables[LOCKS[0]]}
    tables[LOCKS[1]] = [row for row in tables[LOCKS[1]] if row[0] not in running]
    missing = [row[0] for rows in tables.values() for row in rows if row[2].endswith("missing")]
    if missing:
        raise InputError(f"{', '.join(missing)} are locked but not installed: run this by `make licenses`")
    if args.out:
        args.out.write_text(page(tables), encoding="utf-8")
    else:
        print(page(tables), end="")
    unknown = [f"{row[0]} ({row[2]})" for rows in tables.values() for row in rows if row[3] == "unknown"]
    if unknown:
        raise InputError(f"look at the licences of {', '.join(unknown)}: no rule knows them")
    hidden = [row[0] for row in tables[LOCKS[0]] if row[3] == "copyleft"]
    if hidden:
        raise InputError(f"{', '.join(hidden)}: copyleft among what runs need")


if __name__ == "__main__":
    sys.exit(cli.run(main))
