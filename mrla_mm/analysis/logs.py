"""The figures that mmengine logs during a run, one JSON object a line, as a killed or resumed run leaves them.

A killed run tears the line that it was writing, which is its log's last one and is left out. Any other line that is no
record is left out with a warning. Each start of a run has a log of its own; what an earlier one logged from where a
later one began was done again, or never counted, and is left out too.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from mrla_mm.arguments import is_number
from mrla_mm.errors import InputError


def training_logs(work_dir: str | Path) -> list[Path]:
    """Scalar logs below a work directory, oldest first: each start or resumption of a run adds one."""
    return sorted(Path(work_dir).glob("*/vis_data/scalars.json"))


def read_log(path: str | Path) -> list[dict]:
    """Return the records of one log, in order; each has a "step".

    Raises:
        InputError: the file is missing or cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InputError(f"training log {path} cannot be read: {error.strerror}") from error
    records, odd = [], []
    for number, line in enumerate(lines, 1):
        record = parse(line)
        if record is not None:
            records.append(record)
        elif line.strip() and number < len(lines):
            odd.append(number)
    if odd:
        shown = ", ".join(map(str, odd[:5])) + (", ..." if len(odd) > 5 else "")
        warnings.warn(f"{path}: {len(odd)} of {len(lines)} lines are no log records, left out: {shown}", stacklevel=2)
    return records


def parse(line: str) -> dict | None:
    """Return the record in a line, or None for a line that is torn or something else."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and is_number(record.get("step")) else None


def read_scalars(json_logs: Sequence[str | Path]) -> tuple[list[dict], list[dict]]:
    """Training and validation records of a run, each sorted by step.

    Args:
        json_logs: files of one JSON object a line, oldest first.

    Returns:
        tuple: records with a "loss" (which may be NaN) by iteration, and records with a "coco/..." metric by epoch.

    Raises:
        InputError: a file is missing, or none holds a training record.
    """
    train: dict[int, dict] = {}
    val: dict[int, dict] = {}
    for path in json_logs:
        records = read_log(path)
        steps = [record for record in records if isinstance(record.get("loss"), int | float)]
        if steps:
            first = steps[0]
            train = {step: record for step, record in train.items() if step < first["step"]}
            val = {step: record for step, record in val.items() if step < first.get("epoch", first["step"])}
        train |= {record["step"]: record for record in steps}
        val |= {record["step"]: record for record in records if is_validation(record)}
    if not train:
        raise InputError(f"no training record in {[str(p) for p in json_logs]}: give mmengine's scalars.json files")
    return [train[step] for step in sorted(train)], [val[step] for step in sorted(val)]


def is_validation(record: dict) -> bool:
    """Whether a record holds figures of COCO's evaluation."""
    return "loss" not in record and any(key.startswith("coco/") for key in record)
