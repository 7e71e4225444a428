"""`python -m mrla_mm train CONFIG ...`: the packed tools, for users without a checkout."""

import ast
import difflib
import runpy
import sys
from pathlib import Path

from mrla_mm import cli
from mrla_mm.errors import InputError

TOOLS = Path(__file__).parent / ".mim/tools"


def summary(path: Path) -> str:
    """Return what a tool does, from the first line of its docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(": `")[0].rstrip(".")


def main(argv: list[str] | None = None) -> None:
    """Run the packed tool that the first argument names with the arguments that follow it.

    Raises:
        InputError: there is no such tool; names the nearest.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    tools = {path.stem: path for path in sorted(TOOLS.glob("*.py"))}
    if name in ("-h", "--help"):
        lines = [f"  {tool:{max(map(len, tools))}}  {summary(path)}" for tool, path in tools.items()]
        head = "usage: python -m mrla_mm TOOL [arguments]; TOOL --help has its arguments"
        print("\n".join([head, "", *lines]))  # noqa: T201
        return
    if name not in tools:
        near = difflib.get_close_matches(name.removesuffix(".py").replace("-", "_"), tools, n=1) or sorted(tools)
        raise InputError(f"unknown tool {name!r}; nearest: {', '.join(near)}")
    sys.argv = [str(tools[name]), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(cli.run(main))
