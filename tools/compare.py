#!/usr/bin/env python
"""Train and test configs from several seeds each, and compare what they reach.

The same command goes on where it was ended, skips what is finished and retries what failed. Runs
of a seed see the same images, and start from the same weights where the first config has them too.
"""

import argparse
import signal
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from mrla_mm import cli
from mrla_mm.analysis import compare
from mrla_mm.atomic import lock_folder
from mrla_mm.engine.stopping import TERMINATED


def at_least(least, text):
    """Return a whole number, or let argparse refuse the text."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return int(text)


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("configs", nargs="+", help="files, or package::name; the first is the base")
    positive = partial(at_least, 1)
    seed = partial(at_least, 0)
    parser.add_argument("--seeds", type=positive, default=5, help="runs of each (default: 5)")
    parser.add_argument("--first-seed", type=seed, default=0, help="to confirm on unseen seeds")
    parser.add_argument("--jobs", type=positive, help="runs at a time (default: one, or one a GPU)")
    parser.add_argument("--metric", help="e.g. coco/bbox_mAP (default: the first of the test)")
    parser.add_argument("--out", type=Path, default="work_dirs/compare", help="for all results")
    cli.add_option_argument(parser)
    return parser.parse_args(argv)


def main(argv=None):
    """Run what is missing; write and print what was found."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with lock_folder(args.out, "--out"):
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        plan = compare.make_plan(args.configs, args.out, seeds, args.cfg_options)
        for remark in plan.remarks:
            print(remark)
        missing = [run for run in plan.runs() if not run.is_finished()]
        print(f"{len(missing)} of {len(plan.runs())} runs to do", flush=True)
        failures = []
        with closing(compare.run_all(missing, compare.find_slots(args.jobs))) as ended:
            for number, (run, failure) in enumerate(ended, 1):
                outcome = f"{run.folder} " + (f"fails: {failure}" if failure else "is finished")
                print(f"{outcome}; {len(missing) - number} left", flush=True)
                if failure:
                    failures.append(outcome)
                compare.write_results(plan, args.metric, failures)
        faults = compare.write_results(plan, args.metric, failures)
        print((args.out / "table.md").read_text(), end="")
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(cli.run(main))
