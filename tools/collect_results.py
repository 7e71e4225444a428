#!/usr/bin/env python
"""Collect what finished trainings measured: `python tools/collect_results.py WORK_DIR ...`.

Each work directory is matched with a row of the paper's tables, checked, and recorded in DOCS/measured.json. The
reproduction guide DOCS/reproduce.md and the metafiles in configs/ are then written anew from the record. A directory
that is no complete run of one row is refused with its reason; nothing recorded is ever lost.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before configs name mmdet's
from mrla_mm import cli, outputs
from mrla_mm.analysis import metafiles, reproduction, runs
from mrla_mm.analysis.paper_rows import ROWS
from mrla_mm.errors import InputError

PACKED = Path(mrla_mm.__file__).parent / ".mim"


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="collect_results.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "work_dirs", nargs="*", type=Path, metavar="WORK_DIR", help="of a training, or one start's folder"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of measured.json and reproduce.md")
    parser.add_argument("--memory", action="store_true", help="take only GPU memory, of runs that need not have ended")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 2 if a file is out of date")
    args = parser.parse_args(argv)
    if args.check and args.work_dirs:
        raise InputError("--check compares the files with the record and takes no work directories")
    return args


def collect(args, rows, images):
    """Return the record with the runs of the work directories, and why some are refused."""
    record, refused = reproduction.read_record(args.docs / "measured.json"), []
    load = cache(lambda model: runs.row_config(next(row for row in rows if row.model == model), PACKED / "configs"))
    for work_dir in args.work_dirs:
        try:
            run = runs.read_run(work_dir, rows, lambda row: load(row.model), images=images, memory_only=args.memory)
            record = reproduction.add_run(record, run)
            print(f"{work_dir}: {run['model']}, {run['figures'] or run['memory']}")
        except InputError as error:
            refused.append(str(error) if str(work_dir) in str(error) else f"{work_dir}: {error}")
    return record, refused


def files(docs, record):
    """Return the contents of all files that follow from the record, by path."""
    found = {docs / "measured.json": json.dumps({"runs": record}, indent=1) + "\n"}
    page = docs / "reproduce.md"
    if page.is_file():
        found[page] = reproduction.fill(page.read_text(encoding="utf-8"), record)
    checkout = docs.resolve().parent
    if (checkout / "model-index.yml").is_file():
        found |= {checkout / path: text for path, text in metafiles.write_all(checkout / "configs", record).items()}
    return found


def main(argv=None, rows=ROWS, images=None):
    """Collect with the given command line; rows and images of an epoch can be a test's own."""
    args = parse_args(argv)
    if not args.check:
        outputs.make_folder(args.docs, "--docs")
    record, refused = collect(args, rows, images)
    if refused and len(refused) == len(args.work_dirs):
        raise InputError("refused:\n  " + "\n  ".join(refused))
    stale = {
        path: text
        for path, text in files(args.docs, record).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    if args.check and stale:
        raise InputError(f"out of date: {', '.join(map(str, stale))}; run tools/collect_results.py")
    for path, text in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")
    if refused:
        raise InputError("refused:\n  " + "\n  ".join(refused))


if __name__ == "__main__":
    sys.exit(cli.run(main))
