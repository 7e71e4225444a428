"""Sphinx configuration: Markdown pages and an API reference from docstrings."""

import ast
import importlib
import re
from pathlib import Path

from docutils.nodes import SkipNode, Text, literal, literal_block, tgroup
from docutils.nodes import row as row_node
from docutils.utils.math.latex2mathml import tex2mathml

import mrla_mm  # the stand-in operators must be in place before autodoc imports what imports mmdet

project = "mrla_mm"
author = "the mrla_mm contributors"
version = release = mrla_mm.__version__
html_title = f"mrla_mm {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
copybutton_exclude = ".linenos, .gp, .go"
html_math_renderer = "mathml"  # which browsers show without a script from the network
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

NUMBER = re.compile(r"[-+]?\d[\d,.]*( ?[±/→] ?\d[\d.]*)?", re.ASCII)  # with an error, or two
TOOLS = Path(__file__).parent.parent / "tools"
BLOCK = "\n```{{eval-rst}}\n.. automodule:: {0}\n   :members:\n{1}```\n"
MEMBER = "\n```{{eval-rst}}\n.. {0}:: {1}\n{2}```\n"
# What the parts of the package ask of each other.
INTERNAL = {"changed_arguments", "remove_shortcut", "recorded_arguments"}


def reference_of(name, members=""):
    """Return the reference of a folder or module: of members, what it exports or its modules."""
    module = importlib.import_module(name)
    if members:
        return "".join(reference_of_member(module, member) for member in members.split())
    if not hasattr(module, "__path__"):
        return BLOCK.format(name, "")
    owners = [getattr(each, "__module__", "") for each in vars(module).values()]
    if any(owner.startswith(f"{name}.") for owner in owners):
        return BLOCK.format(name, "   :imported-members:\n")
    text = ""
    for path in sorted(Path(module.__path__[0]).glob("[a-z]*.py")):
        text += f"\n## `{path.stem}`\n" + BLOCK.format(f"{name}.{path.stem}", "")
    return text


def reference_of_member(module, name):
    """Return the reference of a class or a function of a module."""
    path = f"{module.__name__}.{name}"
    if isinstance(getattr(module, name), type):
        return MEMBER.format("autoclass", path, "   :members:\n")
    return MEMBER.format("autofunction", path, "")


def fill_in_reference(app, docname, source):
    """Fill in what a page asks for: the reference of a module or its members, the tools."""
    text = source[0]
    if "<!-- tools -->" in text:
        text = text.replace("<!-- tools -->", table_of_tools())
    asked = r"<!-- reference: ([\w.]+)([\w ]*) -->"
    source[0] = re.sub(asked, lambda found: reference_of(found[1], found[2]), text)


def table_of_tools():
    """Return a table of the tools and the first lines of their docstrings."""
    rows = ["| tool | |", "|---|---|"]
    for path in sorted(TOOLS.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        rows.append(f"| `{path.stem}` | {docstring.splitlines()[0]} |")
    return "\n".join(rows)


def skip_internals(app, what, name, obj, skip, options):
    """Leave out internal methods, and what Python says of the fields of a named tuple."""
    is_field = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return skip or is_field or name.rpartition(".")[2] in INTERNAL


def keep_errors_beside_means(app, doctree):
    """Let no line break part "49.4 ± 0.7"."""
    for text in list(doctree.findall(Text)):
        if " ± " in text and not isinstance(text.parent, literal | literal_block):
            text.parent.replace(
                text, Text(text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"))
            )


def align_numbers(app, doctree):
    """Align the columns of a table to the right that hold nothing but numbers."""
    for group in doctree.findall(tgroup):
        rows = [list(row.children) for row in group.findall(row_node)]
        for column in zip(*rows, strict=False):
            texts = [cell.astext().strip() for cell in column[1:]]
            if any(texts) and all(NUMBER.fullmatch(text) for text in texts if text):
                for cell in column:
                    cell["classes"].append("number")


def show_formula(self, node):
    """Write a formula as MathML."""
    is_block = node.tagname == "math_block"
    formula = tex2mathml(node.astext(), as_block=is_block)
    self.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
    raise SkipNode


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
    app.add_html_math_renderer("mathml", (show_formula, None), (show_formula, None))
    app.connect("source-read", fill_in_reference)
    app.connect("autodoc-skip-member", skip_internals)
    app.connect("doctree-read", align_numbers)
    app.connect("doctree-read", keep_errors_beside_means)
    app.connect(
        "autodoc-process-docstring", keep_formulas, priority=400
    )  # before Napoleon reads the sections
