"""What a reader copies from README and documentation: shell commands and Python."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from .conftest import ROOT

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Fence(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def pages() -> list[Path]:
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(path for path in found if "_build" not in path.parts)]


def fences(language: str) -> list[Fence]:
    found = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Fence(path.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return [fence for fence in found if fence.language == language]


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for fence in fences("bash"):
        for line in fence.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                found.append((fence.page, words))
    return found
