#!/usr/bin/env python
"""Print the lines of each folder and the totals beside their limits; exit with 1 above a limit.

`make size` runs it. Lines are those of `wc -l` in Python and shell files, blank lines and
docstrings counted.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"mrla_mm": 10_300, "tools": 1_200, ".dev_scripts": 2_000, "tests": 10_300}


def count_lines(path):
    """Count the lines of a Python or shell file, or of all such files below a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    files = [file for file in files if file.suffix in (".py", ".sh") and ".mim" not in file.parts]
    return sum(file.read_bytes().count(b"\n") for file in files)


def main():
    """Print the table; return the exit code."""
    package = ROOT / "mrla_mm"
    for folder in sorted(path.parent for path in package.glob("*/__init__.py")):
        print(f"  mrla_mm/{folder.name:<16}{count_lines(folder):>8,}")
    modules = sum(count_lines(path) for path in package.glob("*.py"))
    print(f"  mrla_mm/{'*.py':<16}{modules:>8,}\n{'':26}{'now':>8}{'limit':>8}")
    code = 0
    for name, limit in LIMITS.items():
        lines = count_lines(ROOT / name)
        if name == "mrla_mm":
            lines += count_lines(ROOT / "mrla_doctor.py")  # beside the package
        if lines > limit:
            code = 1
        print(f"{name:26}{lines:8,}{limit:8,}{'  above' if lines > limit else ''}")
    return code


if __name__ == "__main__":
    sys.exit(main())
