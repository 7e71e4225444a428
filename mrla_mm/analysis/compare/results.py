"""The results of a comparison's finished runs: runs.csv, table.md and the plots."""

import csv
import json
import math

from mrla_mm.analysis.compare.plan import RESULT, Plan
from mrla_mm.analysis.compare.statistics import BySeed, draw, gains_over_first, make_table
from mrla_mm.atomic import write_atomically


def write_results(plan: Plan, metric: str | None, failures: list[str]) -> list[str]:
    """Write what is finished; return all faults: the failures, and each run without the metric.

    They are below the table. The metric is by default the first that the test returns.
    """
    finished = [run for run in plan.runs() if run.is_finished()]
    results = [json.loads((run.folder / RESULT).read_text()) for run in finished]
    faults = list(failures)
    table = ""
    if results:
        metric = metric or next(iter(results[0]["metrics"]))
        values, runs_without_metric = values_by_seed(plan, results, metric)
        faults += runs_without_metric
        costs = {name: [] for name in plan.names}
        for result in results:
            costs[result["config"]].append(result["costs"])
        table = make_table(values, metric, costs)
        write_csv(plan, results)
        if len(values) > 1:
            figure = draw(gains_over_first(values), f"{metric} less that of {plan.names[0]}")
            for suffix in ("svg", "png"):
                figure.savefig(plan.out / f"differences.{suffix}", dpi=150)
    text = table + "".join(f"\n{line}\n" for line in (*plan.remarks, *faults))
    write_atomically(plan.out / "table.md", text.encode())
    return faults


def values_by_seed(
    plan: Plan, results: list[dict], metric: str
) -> tuple[dict[str, BySeed], list[str]]:
    """Return a metric of each config by seed, and a fault for each run where it is not finite."""
    values = {name: {} for name in plan.names}
    faults = []
    for result in results:
        value = result["metrics"].get(metric, math.nan)
        if math.isfinite(value):
            values[result["config"]][result["seed"]] = value
        else:
            run = f"{result['config']}, seed {result['seed']}"
            faults.append(f"{run}: no {metric} in {json.dumps(result['metrics'])}")
    return values, faults


def write_csv(plan: Plan, results: list[dict]) -> None:
    """Write a row for each run, with all metrics and costs."""
    rows = []
    for result in results:
        run = dict(config=result["config"], seed=result["seed"])
        rows.append(run | result["metrics"] | result["costs"])
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (plan.out / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
