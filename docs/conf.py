"""Sphinx configuration: Markdown pages and an API reference from docstrings; `make docs` builds docs/_build."""

import ast
import re
from pathlib import Path

import mrla_mm  # the stand-in ops must be in place before autodoc imports what imports mmdet

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

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

default_role = "literal"  # `name` in a docstring is code
napoleon_use_rtype = False
napoleon_use_ivar = True  # autodoc already describes the fields of a named tuple
autodoc_inherit_docstrings = False  # what a host's class says about itself is in the host's documentation
autodoc_default_options = {"member-order": "bysource", "show-inheritance": True}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100


def list_tools(app, docname, source):
    """Fill in the list of command line tools, from the first line of each."""
    if docname == "api/tools":
        rows = ["| tool | |", "|---|---|"]
        for path in sorted((Path(app.srcdir).parent / "tools").glob("*.py")):
            summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).splitlines()[0]
            rows.append(f"| `{path.stem}` | {summary} |")
        source[0] = re.sub(r"<!-- list of tools: .*? -->", "\n".join(rows), source[0])


def list_analysis(app, docname, source):
    """Fill in the reference of every module of the analysis."""
    if docname == "api/analysis":
        names = sorted(path.stem for path in Path(mrla_mm.__file__).parent.glob("analysis/[a-z]*.py"))
        block = "## `{0}`\n\n```{{eval-rst}}\n.. automodule:: mrla_mm.analysis.{0}\n   :members:\n```\n"
        source[0] = re.sub(r"<!-- list of modules: .*? -->", "\n".join(map(block.format, names)), source[0])


def keep_formulas(app, what, name, obj, options, lines):
    """Take indented paragraphs of a docstring, which are formulas and tables in plain text, as they stand."""
    for number in range(len(lines) - 1, 0, -1):
        line, above = lines[number], lines[number - 1]
        if line.startswith(" ") and not above.strip():
            before = next((text for text in reversed(lines[:number]) if text.strip()), " ")
            if not before.startswith(" "):
                lines[number:number] = ["::", ""]


def setup(app):
    """Register what this file adds to Sphinx."""
    app.connect("source-read", list_tools)
    app.connect("source-read", list_analysis)
    app.connect("autodoc-process-docstring", keep_formulas, priority=400)  # before Napoleon reads the sections
