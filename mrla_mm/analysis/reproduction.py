"""The reproduction guide: commands, expected times and the paper's figures beside measured ones, for every row."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrla_mm.analysis.paper_rows import PaperRow
from mrla_mm.analysis.paper_tables import MEMORY, TABLES, PaperTable, find_row
from mrla_mm.analysis.runs import COCO_IMAGES, IMAGENET_IMAGES
from mrla_mm.errors import InputError

GPUS = 8
# Multiply-adds a second that training sustains on one GPU of the paper's kind (V100, float32): an assumption that fits
# ResNet-50's well-known 400 images a second. Networks of depthwise convolutions wait for memory instead.
RATE, DEPTHWISE_RATE = 5e12, 1e12
NAMES = {"accuracy/top1": "Top-1", "accuracy/top5": "Top-5", "memory": "MiB"}
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SMALL_BATCH = 64  # images on each GPU behind the paper's memory figures


def run_name(row: PaperRow) -> str:
    """Name of a row's work directory: its config's, or one of its own where options change the config."""
    stem = Path(row.config).name
    return re.sub(r"[^a-z0-9]+", "_", row.model.lower()).strip("_") if row.options else stem


def epochs_of(row: PaperRow) -> int:
    """Epochs of the paper's recipe for a row."""
    if row.is_detector:
        return 12
    return {"resnet": 100, "efficientnet": 350}.get(re.match(r"imagenet/([a-z]+)", row.config)[1], 300)


def start_of(row: PaperRow) -> PaperRow | None:
    """Row of the classifier that a detector of the paper starts from, or None where its config names public weights."""
    depth = re.search(r"R(\d+) \+ (\w+)", row.model) if row.is_detector else None
    return find_row(f"ResNet-{depth[1]} + {depth[2]}") if depth else None


def command(row: PaperRow, *, images_per_gpu: int | None = None) -> str:
    """Return the shell command that trains a row, its start weights where its classifier's training left them.

    Args:
        row: the paper's.
        images_per_gpu: batch on each GPU, for runs that measure memory as the paper did, on four; the config's
            otherwise.
    """
    name, options = run_name(row), dict(row.options)
    start = start_of(row)
    if start:
        options["model.backbone.init_cfg.checkpoint"] = f"work_dirs/{run_name(start)}/epoch_{epochs_of(start)}.pth"
    gpus = GPUS
    if images_per_gpu:
        gpus, name = 256 // images_per_gpu, f"{name}_memory"
        options["train_dataloader.batch_size"] = images_per_gpu
    text = f"tools/dist_train.sh configs/{row.config}.py {gpus}"
    if name != Path(row.config).name:
        text += f" --work-dir work_dirs/{name}"
    lines = [text, *(["    --cfg-options " + " ".join(f"{k}={v}" for k, v in options.items())] if options else [])]
    return wrap(" \\\n".join(lines))


def wrap(text: str, width: int = 120) -> str:
    """Break the lines of a shell command between its words."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) or 4)
        while len(line) > width:
            at = line.rindex(" ", 0, width - 2)
            lines.append(f"{line[:at]} \\")
            line = indent + line[at + 1 :]
        lines.append(line)
    return "\n".join(lines)


def hours(row: PaperRow) -> float:
    """Hours that the row's training would take on eight GPUs at `RATE`: an estimate from its multiply-adds."""
    operations = row.operations
    if operations is None:
        depth = re.search(r"R(\d+)", row.model)
        operations = (
            find_row(f"Mask R-CNN R{depth[1]}") if depth else find_row(row.model.partition(" + ")[0])
        ).operations
    images = COCO_IMAGES if row.is_detector else IMAGENET_IMAGES
    rate = DEPTHWISE_RATE if "efficientnet" in row.config else RATE
    return epochs_of(row) * images * 3 * operations * 1e9 / (GPUS * rate) / 3600


def time_class(row: PaperRow) -> str:
    """Expected time in words."""
    days = hours(row) / 24
    if days <= 0.55:
        return "half a day"
    return "a day" if days <= 1.5 else f"{round(days)} days"


def metric_name(key: str) -> str:
    """Name of a figure in the paper's tables, by the one under which it is logged."""
    if key in NAMES:
        return NAMES[key]
    size = key.partition("_mAP")[2].lstrip("_")
    mask = "mask " if "segm" in key else ""
    return mask + (f"AP{size}" if size.isdigit() else f"AP {size.upper()}".strip())


def show(value: float | None, key: str) -> str:
    """One figure; mmdet logs -1 for a size of which a set has no object."""
    if value is None or value < 0:
        return "–"
    return f"{value:,.0f}" if key == "memory" else f"{value:.1f}"


def paper_cell(row: PaperRow, table: PaperTable) -> str:
    """Figures of the paper for a row."""
    if table.metrics == MEMORY and row.figures["memory"] is None:
        return "out of memory"
    return " / ".join(show(row.figures.get(key), key) for key in table.metrics)


def our_cell(row: PaperRow, table: PaperTable, runs: Sequence[Mapping]) -> str:
    """Figures of our runs for a row, each with the number of its run; empty until there is one."""
    cells = []
    for number, run in enumerate(runs, start=1):
        if run["model"] != row.model:
            continue
        figures = run["figures"]
        if table.metrics == MEMORY:
            alike = run["batch"] == SMALL_BATCH * run["gpus"] and not run["amp"]
            figures = {"memory": run["memory"]} if alike and run["memory"] else {}
        if any(key in figures for key in table.metrics):
            cells.append(" / ".join(show(figures.get(key), key) for key in table.metrics) + f" [{number}]")
    return "<br>".join(cells)


def table_text(table: PaperTable, runs: Sequence[Mapping], given: dict[str, str]) -> str:
    """Return a table in Markdown and the commands of the rows that no earlier table has.

    Args:
        table: the paper's.
        runs: ours.
        given: number of the table with the command, by model; extended.
    """
    names = " / ".join(metric_name(key) for key in table.metrics)
    memory = table.metrics == MEMORY
    gpus = "4 GPUs, each run stopped after some hundred iterations" if memory else "8 GPUs, estimate"
    lines = [f"### Table {table.number}: {table.title}", "", f"| model | {names}, paper's | ours | {gpus} |"]
    lines.append("|---|---|---|---|")
    blocks, earlier = [], []
    for model in table.models:
        row = find_row(model)
        expected = "minutes" if memory else time_class(row)
        lines.append(f"| {model} | {paper_cell(row, table)} | {our_cell(row, table, runs)} | {expected} |")
        if memory:
            blocks.append(f"# {model}\n{command(row, images_per_gpu=SMALL_BATCH)}")
        elif model in given:
            earlier.append(given[model])
        else:
            given[model] = table.number
            blocks.append(f"# {model}\n{command(row)}")
    lines.append("")
    if blocks:
        lines += ["```bash", *blocks, "```", ""]
    if earlier:
        lines += [
            f"{'Other rows' if blocks else 'All rows'}: the commands of Table {' and '.join(unique(earlier))}.",
            "",
        ]
    return "\n".join(lines)


def unique(items: Sequence[str]) -> list[str]:
    """Items without repetitions, in order."""
    return list(dict.fromkeys(items))


def tables_text(runs: Sequence[Mapping]) -> str:
    """All tables in Markdown."""
    given = {}
    return "\n".join(table_text(table, runs, given) for table in TABLES)


def runs_text(runs: Sequence[Mapping]) -> str:
    """The list of our runs in Markdown."""
    if not runs:
        return "None yet.\n"
    lines = ["| | run | date | code | starts from | GPUs x images, precision |", "|---|---|---|---|---|---|"]
    for number, run in enumerate(runs, start=1):
        code = " ".join(filter(None, [run["version"], (run["commit"] or "")[:10]])) or "not recorded"
        machine = f"{run['gpus']} x {run['batch'] // run['gpus']}, {'mixed' if run['amp'] else 'float32'}"
        start = f"`{run['start']}`" if run["start"] else "random weights"
        lines.append(f"| [{number}] | `{run['run']}` | {run['date']} | {code} | {start} | {machine} |")
    return "\n".join(lines) + "\n"


def fill(page: str, runs: Sequence[Mapping]) -> str:
    """Return the page with its generated parts written anew; what is between them stays."""
    parts = {"tables": tables_text(runs), "runs": runs_text(runs)}
    return BLOCK.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n{found[3]}", page)


def read_record(path: Path) -> list[dict]:
    """Runs recorded so far; none if there is no file.

    Raises:
        InputError: the file is no record.
    """
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no record of runs ({error}): restore it, or move it away") from error
    return found


def add_run(runs: Sequence[Mapping], run: Mapping) -> list[Mapping]:
    """Return the record with one run more; a run that it has already changes nothing, and none is ever dropped.

    Raises:
        InputError: the record has other figures under the run's name.
    """
    known = next((other for other in runs if (other["run"], other["model"]) == (run["run"], run["model"])), None)
    if known is None:
        return [*runs, run]
    if not known["figures"]:  # its memory alone was recorded before it ended
        return [run if other is known else other for other in runs]
    differing = sorted(key for key in known if key in run and known[key] != run[key])
    if differing and run["figures"]:
        raise InputError(
            f"the record has run {run['run']} with another {', '.join(differing)}; remove its entry first if the run "
            "at hand is right"
        )
    return list(runs)
