"""The scalars that mmengine logs during a run, one JSON object a line.

Each start or resumption of a run has a log of its own. What an earlier one logged beyond the point where a later one
began was computed again, and is left out, as are lines that a killed run left torn.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from mrla_mm.errors import InputError


def training_logs(work_dir: str | Path) -> list[Path]:
    """Return the scalar logs in a work directory, oldest first."""
    return sorted(Path(work_dir).glob("*/vis_data/scalars.json"))


def read_log(path: str | Path) -> list[dict]:
    """Return the records of one log, in order; each has a "step"."""
    records = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    return records


def read_scalars(json_logs: Sequence[str | Path]) -> tuple[list[dict], list[dict]]:
    """Return the training and validation records of a run, each sorted by step.

    Training records have a "loss" (which may be NaN) and are by iteration; validation records are by epoch.

    Raises:
        InputError: no log has a training record.
    """
    train: dict[int, dict] = {}
    val: dict[int, dict] = {}
    for path in json_logs:
        records = read_log(path)
        steps = [record for record in records if "loss" in record]
        if steps:
            first = steps[0]
            train = {step: record for step, record in train.items() if step < first["step"]}
            val = {step: record for step, record in val.items() if step < first.get("epoch", first["step"])}
        train |= {record["step"]: record for record in steps}
        val |= {record["step"]: record for record in records if any(key.startswith("coco/") for key in record)}
    if not train:
        raise InputError(f"no training record in {[str(p) for p in json_logs]}: give mmengine's scalars.json files")
    return [train[step] for step in sorted(train)], [val[step] for step in sorted(val)]
