#!/usr/bin/env python
"""Print lines per room beside the aims of the design, and the totals beside their limits; exit with 1 above a limit.

`make size` runs it. Lines are those of `wc -l` in Python and shell files, blank lines and docstrings counted; words are
those of `wc -w` in README, CHANGELOG and docs.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = dict(ops=1600, attention=600, backbones=1000, necks=100, comparators=500, compat=900, weights=800, engine=350)
ROOMS |= dict(datasets=400, analysis=900)
MODULES = 700  # cli, config, inference, ...: the files directly in mrla_mm
LIMITS = {"mrla_mm": 9000, "tools": 1300, ".dev_scripts": 2000, "tests": 9000}
WORDS = 12000


def lines(*paths):
    """Count the lines of the Python and shell files among these files and below these folders."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    files = [file for file in files if file.suffix in (".py", ".sh") and ".mim" not in file.parts]
    return sum(file.read_bytes().count(b"\n") for file in files)


def words():
    """Count the words of the documentation."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages if "_build" not in page.parts)


def main():
    """Print the table; return the exit code."""
    package = ROOT / "mrla_mm"
    rooms = sorted(path.parent for path in package.glob("*/__init__.py"))
    rows = [(f"mrla_mm/{room.name}", lines(room), ROOMS.get(room.name, 0)) for room in rooms]
    rows.append(("mrla_mm/*.py", lines(*package.glob("*.py")), MODULES))
    totals = [(name, lines(ROOT / name), limit) for name, limit in LIMITS.items()]
    totals.append(("docs, words", words(), WORDS))
    for title, part in (("aim", rows), ("limit", totals)):
        print(f"{'':22}{'now':>8}{title:>8}")
        for name, count, wanted in part:
            print(f"{name:22}{count:8,}{wanted:8,}{'  above' if count > wanted else ''}")
    return int(any(count > limit for _, count, limit in totals))


if __name__ == "__main__":
    sys.exit(main())
