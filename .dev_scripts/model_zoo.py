"""Fill the tables of docs/models.md from the metafiles, one row for each config.

A metafile states how many parameters a model has, what the paper reports for it, what mmdet reports
for its own plain model (named as in mmdet's metafiles) and, under Results, what we have measured.
"""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
# What others report: the entry of a metafile and its column, by the data a model is trained on.
REPORTED = {
    "COCO": {"Paper": "paper's AP", "Plain of mmdet": "mmdet's plain AP"},
    "ImageNet-1k": {"Paper": "paper's top-1"},
}
METRICS = ("box AP", "mask AP", "box AP50", "Top 1 Accuracy")
TABLE = re.compile(r"(<!-- (configs/[\w/]*metafile\.yml) -->\n\n)(?:\|.*\n)*")


def natural_order(model: dict) -> list[str | int]:
    """Return a name as texts and numbers in turn, so that r50 comes before r101."""
    parts = re.split(r"(\d+)", model["Name"])
    return [int(part) if part.isdigit() else part for part in parts]


def metrics_of(found: dict) -> str:
    """Return the metrics of an entry, boxes before masks, or "" if it has none."""
    return " / ".join(f"{found[metric]:.1f}" for metric in METRICS if metric in found)


def row_of(model: dict, reported: dict[str, str]) -> list[str]:
    """Return the cells of a model's row."""
    metadata = model["Metadata"]
    path = Path(model["Config"]).relative_to("configs").with_suffix("")
    cells = [f"`{path}`", f"{metadata['Parameters'] / 1e6:.2f}"]
    cells += [metrics_of(metadata.get(entry, {})) for entry in reported]
    (ours,) = [result["Metrics"] for result in model.get("Results", [])] or [{}]
    weights = f"`{Path(model['Weights']).name}`" if "Weights" in model else ""
    return [*cells, metrics_of(ours) or "not run", model.get("Training Log", ""), weights]


def table_of(metafile: str) -> str:
    """Return the table of a metafile's models."""
    models = yaml.safe_load((ROOT / metafile).read_text(encoding="utf-8"))["Models"]
    reported = REPORTED.get(models[0]["Metadata"]["Training Data"], {})
    numbers = ["parameters, M", *reported.values()]
    header = ["config", *numbers, "ours", "log", "weights"]
    rule = ["---", *["--:"] * len(numbers), "---", "---", "---"]
    rows = [row_of(model, reported) for model in sorted(models, key=natural_order)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


def filled_in(page: str) -> str:
    """Return the page with its tables as the metafiles have them."""
    return TABLE.sub(lambda found: found[1] + table_of(found[2]), page)


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
