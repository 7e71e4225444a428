"""Fill docs/tables with what we count for each row of the paper's tables, and list what differs.

imagenet.csv and coco.csv hold the paper's values and, beside each, ours, which this script counts
again: parameters and multiply-adds of the row's config. differences.csv lists the values that,
rounded as the paper's are, are not the paper's; docs/reproduce.md shows it. For Mask R-CNN it
compares multiply-adds over plain, because the totals differ by the mask head.
"""

import csv
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import NamedTuple

import yaml

from mrla_mm.analysis.complexity import measure
from mrla_mm.config import read_config
from mrla_mm.inference import build_model

TABLES = Path(__file__).parents[1] / "docs/tables"
FOLDERS = {"imagenet.csv": "imagenet/", "coco.csv": ""}  # of configs/, by table
COUNTS_FROZEN = ("_gc_", "_nl_")  # the paper's numbers of these include the frozen layers


class Row(NamedTuple):
    """First columns of a row of the tables, all text; "" where there is none."""

    table: str
    model: str
    config: str
    options: str
    parameters: str  # the paper's, in millions
    our_parameters: str
    operations: str  # the paper's multiply-adds, in billions
    our_operations: str


WIDTH = len(Row._fields)


def read_table(name: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table."""
    with (TABLES / name).open(encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return header, rows


def write_table(name: str, header: list[str], rows: list[list[str]]) -> None:
    """Write a table."""
    with (TABLES / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def read_rows() -> dict[str, list[Row]]:
    """Return the rows of both tables."""
    tables = {name: read_table(name)[1] for name in FOLDERS}
    return {name: [Row(*cells[:WIDTH]) for cells in rows] for name, rows in tables.items()}


def count(row: Row, folder: str) -> tuple[str, str]:
    """Return parameters in millions and multiply-adds in billions of a row's config."""
    options = dict(option.split("=") for option in row.options.split())
    options = {f"model.backbone.{key}": yaml.safe_load(value) for key, value in options.items()}
    name = row.config if "::" in row.config else f"mrla_mm::{folder}{row.config}"
    cfg = read_config(f"{name}.py", options)
    cost = measure(build_model(cfg), image_size(row, folder))
    is_trained = folder == "" and not any(part in row.config for part in COUNTS_FROZEN)
    parameters = cost.trainable if is_trained else sum(cost.parameters.values())
    return f"{parameters / 1e6:.4f}", f"{cost.total / 1e9:.4f}"


def image_size(row: Row, folder: str) -> tuple[int, int]:
    """Return the height and width of the image that a row is counted for."""
    if folder == "":
        return 800, 1280
    if "img_size=384" in row.options:
        return 384, 384
    return (240, 240) if "EfficientNet-B1" in row.model else (224, 224)


def count_again(name: str, folder: str) -> None:
    """Count the rows of a table that have a config."""
    header, rows = read_table(name)
    counted = []
    for cells in rows:
        row, accuracies = Row(*cells[:WIDTH]), cells[WIDTH:]
        if row.config:
            parameters, operations = count(row, folder)
            row = row._replace(our_parameters=parameters, our_operations=operations)
            print(row.model, parameters, operations, flush=True)
        counted.append([*row, *accuracies])
    write_table(name, header, counted)


def differs(paper: str, ours: str) -> bool:
    """Whether our value, rounded to as many digits as the paper's, is another; not if one lacks."""
    if not paper or not ours:
        return False
    return Decimal(ours).quantize(Decimal(paper), ROUND_HALF_UP) != Decimal(paper)


def over_plain(row: Row, plain: Row) -> tuple[str, str]:
    """Return the multiply-adds of a row minus those of its plain detector, the paper's and ours."""
    if not row.operations:
        return "", ""
    paper = Decimal(row.operations) - Decimal(plain.operations)
    return str(paper), str(Decimal(row.our_operations) - Decimal(plain.our_operations))


def differences(rows: list[Row]) -> list[list[str]]:
    """Return model, quantity, the paper's value, ours, and ours minus the paper's."""
    found = []
    by_model = {row.model: row for row in rows}
    for row in rows:
        compared = [("parameters, M", row.parameters, row.our_parameters)]
        if row.model.startswith("Mask R-CNN"):
            plain = by_model[row.model.partition(" +")[0]]
            compared.append(("multiply-adds over plain, G", *over_plain(row, plain)))
        else:
            compared.append(("multiply-adds, G", row.operations, row.our_operations))
        for quantity, paper, ours in compared:
            if differs(paper, ours):
                delta = Decimal(ours) - Decimal(paper)
                found.append([row.model, quantity, paper, ours, f"{delta:+}"])
    return found


def all_differences() -> list[list[str]]:
    """Return the rows of differences.csv."""
    return [found for rows in read_rows().values() for found in differences(rows)]


def main() -> None:
    """Count all rows and list the differences."""
    for name, folder in FOLDERS.items():
        count_again(name, folder)
    header = ["model", "quantity", "paper", "ours", "ours minus paper"]
    write_table("differences.csv", header, all_differences())


if __name__ == "__main__":
    main()
