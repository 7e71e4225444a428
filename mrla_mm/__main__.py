"""`python -m mrla_mm train CONFIG ...`: the packed tools, and mmdet's with our names registered."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from mrla_mm import __version__, cli
from mrla_mm.errors import InputError, did_you_mean

TOOLS = Path(__file__).parent / ".mim/tools"
USAGE = """usage: python -m mrla_mm TOOL [arguments]         TOOL --help has its arguments
       python -m mrla_mm mmdet TOOL [arguments]   a tool of mmdet's, with our names registered
"""


def main(argv: list[str] | None = None) -> None:
    """Run the packed tool, ours or mmdet's, that the first arguments name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder = TOOLS
    if arguments[:1] == ["mmdet"]:
        folder = Path(find_spec("mmdet").origin).parent / ".mim/tools"
        arguments.pop(0)
    name, *rest = arguments or ["--help"]
    paths = folder.rglob("*.py")
    tools = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in paths)
    if name in ("-h", "--help"):
        print(USAGE, *tools, sep="\n")  # noqa: T201
        return
    if name == "--version":
        print(__version__)  # noqa: T201
        return
    if name not in tools:
        below = [tool for tool in tools if tool.endswith(f"/{name}")]
        hint = did_you_mean(name, tools) or f"; there are {', '.join(below or tools)}"
        raise InputError(f"there is no tool {name!r}{hint}")
    sys.argv = [f"{folder}/{name}.py", *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(cli.run(main))
