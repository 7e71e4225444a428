"""`python -m mrla_mm train CONFIG ...`: the packed tools, and mmdet's with our names registered."""

import ast
import difflib
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from mrla_mm import cli
from mrla_mm.errors import InputError

TOOLS = Path(__file__).parent / ".mim/tools"
USAGE = """usage: python -m mrla_mm TOOL [arguments]         TOOL --help has its arguments
       python -m mrla_mm mmdet TOOL [arguments]   a tool of mmdet's, with our names registered
"""


def summary(path: Path) -> str:
    """Return what a tool does, from the first line of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(": `")[0].rstrip(".")


def main(argv: list[str] | None = None) -> None:
    """Run the packed tool, ours or mmdet's, that the first arguments name, with the rest of them.

    Raises:
        InputError: there is no such tool; names the nearest.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder = TOOLS
    if arguments[:1] == ["mmdet"]:
        folder = Path(find_spec("mmdet").origin).parent / ".mim/tools"
        arguments.pop(0)
    name, *rest = arguments or ["--help"]
    paths = sorted(folder.rglob("*.py"))
    tools = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
    if name in ("-h", "--help"):
        print(USAGE)  # noqa: T201
        for tool, path in tools.items():
            print(f"  {tool:{max(map(len, tools))}}  {summary(path)}".rstrip())  # noqa: T201
        return
    name = name.removesuffix(".py")
    if name not in tools:
        near = difflib.get_close_matches(name.replace("-", "_"), tools, n=1) or sorted(tools)
        raise InputError(f"unknown tool {name!r}; nearest: {', '.join(near)}")
    sys.argv = [str(tools[name]), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(cli.run(main))
