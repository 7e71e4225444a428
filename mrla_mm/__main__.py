"""`python -m mrla_mm train CONFIG ...`: the packed tools, for users without a checkout, and mmdet's with our names."""

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
       python -m mrla_mm mmdet TOOL [arguments]   a tool of mmdet's own, which then knows what mrla_mm registers
"""


def summary(path: Path) -> str:
    """Return what a tool does, from the first line of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(": `")[0].rstrip(".")


def main(argv: list[str] | None = None) -> None:
    """Run the packed tool, ours or mmdet's, that the first arguments name, with the arguments that follow.

    Raises:
        InputError: there is no such tool; names the nearest.
    """
    folder, (name, *rest) = TOOLS, (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "mmdet":
        folder, (name, *rest) = (
            Path(find_spec("mmdet").origin).parent / ".mim/tools",
            rest or ["--help"],
        )
    tools = {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.py"))
    }
    if name in ("-h", "--help"):
        lines = [
            f"  {tool:{max(map(len, tools))}}  {summary(path)}".rstrip()
            for tool, path in tools.items()
        ]
        print("\n".join([USAGE, *lines]))  # noqa: T201
        return
    name = name.removesuffix(".py")
    if name not in tools:
        near = difflib.get_close_matches(name.replace("-", "_"), tools, n=1) or sorted(tools)
        raise InputError(f"unknown tool {name!r}; nearest: {', '.join(near)}")
    sys.argv = [str(tools[name]), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(cli.run(main))
