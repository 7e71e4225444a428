"""Sphinx configuration: Markdown pages and an API reference from docstrings."""

import ast
import importlib
from pathlib import Path

import mrla_mm  # the stand-in operators must be in place before autodoc imports what imports mmdet

project = "mrla_mm"
author = "the mrla_mm contributors"
version = release = mrla_mm.__version__
html_title = f"mrla_mm {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
smartquotes = False  # the first lines of the tools name their options
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_show_copyright = False

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

default_role = "literal"  # `name` in a docstring is code
napoleon_use_rtype = False
napoleon_use_ivar = True  # autodoc already describes the fields of a named tuple
autodoc_inherit_docstrings = False  # the host documents what its classes do
autodoc_default_options = {"member-order": "bysource", "show-inheritance": True}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

PACKAGE, TOOLS = Path(mrla_mm.__file__).parent, Path(__file__).parent.parent / "tools"
BLOCK = "\n```{{eval-rst}}\n.. automodule:: {0}\n   :members:\n{1}```\n"


def reference_of(room):
    """Return the reference of a package: what it exports and builds later, or its modules."""
    exports = vars(importlib.import_module(room)).values()
    if any(getattr(member, "__module__", "").startswith(f"{room}.") for member in exports):
        modules = [f"mrla_mm.{module}" for _, module, _ in mrla_mm.BUILT_LATER]
        later = [name for name in modules if name.startswith(f"{room}.")]
        blocks = [BLOCK.format(name, "") for name in later]
        return BLOCK.format(room, "   :imported-members:\n") + "".join(blocks)
    modules = sorted((PACKAGE / room.partition(".")[2]).glob("[a-z]*.py"))
    return "".join(
        f"\n### `{path.stem}`\n" + BLOCK.format(f"{room}.{path.stem}", "") for path in modules
    )


def fill_in_reference(app, docname, source):
    """List the folders, the modules at the root and the tools on the reference page."""
    if docname != "api/index":
        return
    rooms = sorted(path.parent.name for path in PACKAGE.glob("[a-z]*/__init__.py"))
    parts = [f"## `{room}`\n{reference_of(f'mrla_mm.{room}')}" for room in rooms]
    roots = [
        name
        for name in ("config", "inference", "export", "errors")
        if (PACKAGE / f"{name}.py").exists()
    ]
    parts += [f"## `{name}`\n" + BLOCK.format(f"mrla_mm.{name}", "") for name in roots]
    rows = ["| tool | |", "|---|---|"]
    for path in sorted(TOOLS.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        rows.append(f"| `{path.stem}` | {docstring.splitlines()[0]} |")
    source[0] = (
        source[0]
        .replace("<!-- rooms -->", "\n".join(parts))
        .replace("<!-- tools -->", "\n".join(rows))
    )


def keep_formulas(app, what, name, obj, options, lines):
    """Keep indented paragraphs of a docstring, formulas and tables in plain text, as they are."""
    for number in range(len(lines) - 1, 0, -1):
        line, above = lines[number], lines[number - 1]
        if line.startswith(" ") and not above.strip():
            before = next((text for text in reversed(lines[:number]) if text.strip()), " ")
            if not before.startswith(" "):
                lines[number:number] = ["::", ""]


def setup(app):
    """Register what this file adds to Sphinx."""
    app.connect("source-read", fill_in_reference)
    app.connect(
        "autodoc-process-docstring", keep_formulas, priority=400
    )  # before Napoleon reads the sections
