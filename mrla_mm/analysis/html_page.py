"""Pages of HTML that need nothing beside them: no scripts, no links, pictures inside."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape

import cv2
import numpy as np
from matplotlib.figure import Figure

JPEG_QUALITY = 85
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --page: #ffffff; --soft: #f3f5f7; --line: #d5dae0; --bar: #9ec5e8 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ec; --page: #15181c; --soft: #1f242a; --line: #3a424b; --bar: #2f5f8a }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem; max-width: 75rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin: 0 0 .3rem } h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; padding-top: .6rem;
  border-top: 1px solid var(--line) } h3 { font-size: 1.05rem }
nav a { color: inherit; margin-right: 1rem; white-space: nowrap } p { max-width: 55rem }
table { border-collapse: collapse; font-size: .9rem; margin: .6rem 0 }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
th { background: var(--soft); position: sticky; top: 0 } th:first-child, td:first-child { text-align: left }
.scroll { overflow: auto; max-height: 34rem } .text { text-align: left }
.best { font-weight: 700 } .bar { min-width: 8rem;
  background: linear-gradient(to right, var(--bar) var(--share), transparent 0) }
figure { margin: .8rem 0 } img { max-width: 100%; height: auto; background: #fff; border-radius: 4px }
figcaption { font-size: .85rem; opacity: .8 } pre { background: var(--soft); padding: 1rem; overflow: auto;
  max-height: 34rem; font-size: .8rem } .gallery img { max-height: 26rem } .gallery { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(32rem, 1fr)); align-items: start } @media (max-width: 40rem) {
  .gallery { grid-template-columns: 1fr } }
"""


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a page of sections, each a heading and HTML, with links to them."""
    links = "\n".join(f'<a href="#s{number}">{escape(name)}</a>' for number, (name, _) in enumerate(sections))
    body = "\n".join(
        f'<section id="s{number}"><h2>{escape(name)}</h2>\n{html}</section>'
        for number, (name, html) in enumerate(sections)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"<p>{escape(subtitle)}</p>\n<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def figure_html(figure: Figure, caption: str = "", *, dpi: int = 110) -> str:
    """Return a plot as an image in the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return _figure("png", buffer.getvalue(), caption)


def picture_html(picture: np.ndarray, caption: str, *, width: int) -> str:
    """Return a picture (H, W, 3) uint8, RGB, as an image in the page, at most `width` pixels wide."""
    if picture.shape[1] > width:
        height = round(picture.shape[0] * width / picture.shape[1])
        picture = cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)
    _, encoded = cv2.imencode(".jpg", picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return _figure("jpeg", encoded.tobytes(), caption)


def _figure(kind: str, data: bytes, caption: str) -> str:
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    text = escape(caption)
    return f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>\n'


def table(rows: Sequence[dict], *, bar: str | None = None, best: Sequence[str] = ()) -> str:
    """Return a table with a column for each key of the first row.

    Numbers that are not whole have three decimals, and NaN is shown as a dash.

    Args:
        rows: values by column.
        bar: column whose numbers from 0 to 1 are shown as bars too.
        best: columns whose largest number stands out.
    """
    if not rows:
        return "<p>none</p>"
    largest = {
        column: max((row[column] for row in rows if row[column] == row[column]), default=None) for column in best
    }
    texts = {column for column, value in rows[0].items() if isinstance(value, str)}
    head = "".join(f"<th{_class(column in texts and 'text')}>{escape(str(column))}</th>" for column in rows[0])
    lines = []
    for row in rows:
        cells = []
        for column, value in row.items():
            style = _class(column in texts and "text" or (column in largest and value == largest[column] and "best"))
            if column == bar and value == value:
                style = f' class="bar" style="--share:{100 * max(0, value):.0f}%"'
            cells.append(f"<td{style}>{escape(cell(value))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>\n{chr(10).join(lines)}</table></div>\n'


def facts_table(facts: Mapping[str, str]) -> str:
    """Return names and texts side by side."""
    lines = (f'<tr><td>{escape(name)}</td><td class="text">{escape(text)}</td></tr>' for name, text in facts.items())
    return f"<table>{chr(10).join(lines)}</table>\n"


def _class(name: str | bool) -> str:
    return f' class="{name}"' if name else ""


def cell(value: object) -> str:
    """Return a value as text."""
    if isinstance(value, float):
        return f"{value:.3f}" if value == value else "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def details(summary: str, html: str) -> str:
    """Return HTML that is folded away under a summary."""
    return f"<details><summary>{escape(summary)}</summary>\n{html}</details>\n"
