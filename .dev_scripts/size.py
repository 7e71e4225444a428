#!/usr/bin/env python
"""Print the lines of each folder and the totals beside their budgets; exit with 1 above a ceiling.

`make size` runs it. Lines are those of `wc -l` in Python and shell files, blank lines and
docstrings counted. A ceiling above its budget is a debt: it may be lowered, never raised.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {"mrla_mm": 10_300, "tools": 1_200, ".dev_scripts": 2_000, "tests": 10_300}
CEILINGS = BUDGETS | {"mrla_mm": 11_814}  # what stands above its budget


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
    print(f"  mrla_mm/{'*.py':<16}{modules:>8,}\n{'':26}{'now':>8}{'budget':>8}")
    code = 0
    for name, budget in BUDGETS.items():
        lines = count_lines(ROOT / name)
        if lines > CEILINGS[name]:
            code = 1
        print(f"{name:26}{lines:8,}{budget:8,}{'  above' if lines > budget else ''}")
    return code


if __name__ == "__main__":
    sys.exit(main())
