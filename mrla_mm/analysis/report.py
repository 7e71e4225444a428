"""The report of a training run: one page of HTML that opens offline, with neither scripts nor links."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape

import cv2
import numpy as np
from matplotlib.figure import Figure
from mmengine.config import Config

STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882 }
body { margin: 0 auto; padding: 1.5rem; max-width: 75rem; font: 16px/1.5 system-ui, sans-serif }
h2 { margin-top: 2.4rem; padding-top: .6rem; border-top: 1px solid var(--line) }
table { border-collapse: collapse; font-size: .9rem } th, td { padding: .2rem .7rem; text-align: right;
  border-bottom: 1px solid var(--line) } th { background: var(--soft) }
th:first-child, td:first-child { text-align: left } .scroll, pre { overflow: auto; max-height: 34rem }
figure { margin: .8rem 0 } img { max-width: 100%; background: #fff } figcaption { font-size: .85rem }
pre { background: var(--soft); padding: 1rem; font-size: .8rem }
"""


def page(title: str, subtitle: str, sections: Mapping[str, str]) -> str:
    """Return a page of sections, HTML by heading."""
    body = "".join(
        f"<section><h2>{escape(name)}</h2>\n{html}</section>\n" for name, html in sections.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f"<p>{escape(subtitle)}</p>\n{body}</body></html>\n"
    )


def table(rows: Sequence[Mapping], *, head: bool = True) -> str:
    """Return a table with a column for each key of the first row; floats have three decimals, NaN is a dash."""
    if not rows:
        return "<p>none</p>"
    lines = ["".join(f"<th>{escape(str(key))}</th>" for key in rows[0])] if head else []
    for row in rows:
        texts = [
            f"{value:.3f}".replace("nan", "-") if isinstance(value, float) else str(value)
            for value in row.values()
        ]
        lines.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    return f'<div class="scroll"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>\n'


def figure(content: Figure | np.ndarray, caption: str) -> str:
    """Return a plot, or a picture (H, W, 3) uint8, RGB, as an image in the page."""
    if isinstance(content, Figure):
        kind, buffer = "png", io.BytesIO()
        content.savefig(buffer, format="png", dpi=110)
        data = buffer.getvalue()
    else:
        kind, data = "jpeg", cv2.imencode(".jpg", content[..., ::-1])[1].tobytes()
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return (
        f'<figure><img alt="" src="{source}"><figcaption>{escape(caption)}</figcaption></figure>\n'
    )


def run_facts(cfg: Config, train: Sequence[Mapping], val: Sequence[Mapping]) -> dict[str, str]:
    """Return what was trained, how and on what, from the config and the records of `read_scalars`."""
    backbone = cfg.model.get("backbone", {})
    attention = backbone.get("layer_attention") or {}
    optimizer = cfg.get("optim_wrapper", {}).get("optimizer", {})
    times = sorted(record["time"] for record in train if "time" in record)
    scores = [
        (record["coco/bbox_mAP"], record["step"])
        for record in val
        if record.get("coco/bbox_mAP", -1) >= 0
    ]
    diverged = [record["step"] for record in train if not math.isfinite(record["loss"])]
    facts = {
        "model": cfg.model.type,
        "backbone": f"{backbone.get('type')} {backbone.get('depth', '')}".strip(),
        "layer attention": ", ".join(f"{key}={value}" for key, value in attention.items()),
        "epochs": f"{train[-1].get('epoch', '?')} of {cfg.get('train_cfg', {}).get('max_epochs', '?')}",
        "iterations": str(train[-1]["step"]),
        "batch size (one process)": str(cfg.get("train_dataloader", {}).get("batch_size", "")),
        "optimizer": f"{optimizer.get('type')}, lr {optimizer.get('lr')}",
        "time per iteration": f"{times[len(times) // 2]:.3f} s (median)" if times else "",
        "peak GPU memory": f"{max((record.get('memory', 0) for record in train), default=0)} MB",
        "best box AP in training": f"{max(scores)[0]:.3f} (epoch {max(scores)[1]})"
        if scores
        else "",
        "losses that are not finite": f"{len(diverged)}, the first at iteration {diverged[0]}"
        if diverged
        else "",
        "mrla_mm": cfg.get("mrla_mm_version", ""),
    }
    return {name: text for name, text in facts.items() if text and text != "0 MB"}


def epoch_rows(val: Sequence[Mapping]) -> list[dict]:
    """Return the metrics of each validation, those of single classes left out."""
    keys = dict.fromkeys(key for record in val for key in record if key.startswith("coco/"))
    keys = [key for key in keys if not key.endswith(("_precision", "_copypaste"))]
    return [
        {"epoch": record["step"]}
        | {key.removeprefix("coco/"): float(record.get(key, math.nan)) for key in keys}
        for record in val
    ]


def class_rows(metrics: Mapping[str, float]) -> list[dict]:
    """Return the AP of each class, best first, from what mmdet's CocoMetric reports with classwise=True."""
    found = {
        key[5:-10]: float(ap)
        for key, ap in metrics.items()
        if key.endswith("_precision") and key[:5] == "coco/"
    }
    return [
        {"class": name, "AP": ap}
        for name, ap in sorted(found.items(), key=lambda item: -np.nan_to_num(item[1]))
    ]
