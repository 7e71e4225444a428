"""`python -m mrla_mm train CONFIG ...`: the packed tools, for users without a checkout."""

import runpy
import sys
from pathlib import Path

from mrla_mm import cli
from mrla_mm.errors import InputError

TOOLS = Path(__file__).parent / ".mim/tools"


def main(argv: list[str] | None = None) -> None:
    """Run the packed tool that the first argument names with the arguments that follow it.

    Raises:
        InputError: there is no such tool; the message lists those there are.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    tools = sorted(path.stem for path in TOOLS.glob("*.py") if not path.stem.startswith("_"))
    if name in ("-h", "--help"):
        print(f"usage: python -m mrla_mm TOOL [arguments]\ntools: {', '.join(tools)}")  # noqa: T201
        return
    if name not in tools:
        raise InputError(f"unknown tool {name!r}; there are: {', '.join(tools)}")
    path = str(TOOLS / f"{name}.py")
    sys.argv = [path, *rest]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    sys.exit(cli.run(main))
