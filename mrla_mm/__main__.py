"""`python -m mrla_mm train CONFIG ...`: the packed tools, for users without a checkout."""

import ast
import difflib
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

from mrla_mm import cli
from mrla_mm.errors import InputError

TOOLS = Path(__file__).parent / ".mim/tools"
DEVELOPER_TOOLS = {
    "benchmark",
    "check_distributed",
    "check_training",
    "coco_subset",
    "collect_results",
    "licenses",
    "matrix",
    "torture",
}


def usage(tools: Iterable[str]) -> str:
    """Return the help: the tools with the first line of their docstrings, those of developers apart."""
    users = [name for name in tools if name not in DEVELOPER_TOOLS]
    width = max(map(len, users))
    lines = [f"  {name:{width}}  {summary(name)}" for name in users]
    others = ", ".join(name for name in tools if name in DEVELOPER_TOOLS)
    head = "usage: python -m mrla_mm TOOL [arguments]; TOOL --help has its arguments"
    return "\n".join([head, "", *lines, "", f"for developers of mrla_mm: {others}"])


def summary(name: str) -> str:
    """Return what a tool does, from the first line of its docstring."""
    text = ast.get_docstring(ast.parse((TOOLS / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].partition(": `")[0].rstrip(".") if text else ""


def main(argv: list[str] | None = None) -> None:
    """Run the packed tool that the first argument names with the arguments that follow it.

    Raises:
        InputError: there is no such tool; the message has the nearest one, or those there are.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    tools = sorted(path.stem for path in TOOLS.glob("*.py") if not path.stem.startswith("_"))
    if name in ("-h", "--help"):
        print(usage(tools))  # noqa: T201
        return
    if name not in tools:
        close = difflib.get_close_matches(name.removesuffix(".py").replace("-", "_"), tools, n=1)
        users = ", ".join(tool for tool in tools if tool not in DEVELOPER_TOOLS)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {users}"
        raise InputError(f"unknown tool {name!r}; {hint}")
    path = str(TOOLS / f"{name}.py")
    sys.argv = [path, *rest]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    sys.exit(cli.run(main))
