"""Pieces of the README and the documentation that a reader copies: shell commands and Python."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from .conftest import ROOT

LANGUAGES = {"bash", "python", "text", "yaml"}  # and directives of the site, {toctree} and the like
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)  # tested where it is generated


class Fence(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str


class Command(NamedTuple):
    """A shell command of a page, its words without comments and environment variables."""

    page: str
    text: str
    words: list[str]


def pages() -> list[Path]:
    """README, and every page of the documentation."""
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]


def fences(*languages: str) -> list[Fence]:
    """Fenced blocks of all pages in these languages, or in any."""
    found = []
    for path in pages():
        text = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), path.read_text(encoding="utf-8"))
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Fence(path.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return [fence for fence in found if not languages or fence.language in languages]


def commands() -> list[Command]:
    """Shell commands of all pages, each once a page."""
    found = {}
    for fence in fences("bash"):
        for line in fence.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                found.setdefault((fence.page, tuple(words)), Command(fence.page, " ".join(words), words))
    return list(found.values())
