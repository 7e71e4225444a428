"""The results of a comparison's finished runs: runs.csv, table.md and the plots."""

import csv
import json
import math
from collections import defaultdict

from mrla_mm.analysis.comparison import draw, gains_over_first, make_table
from mrla_mm.atomic import write_atomically
from mrla_mm.compare.plan import RESULT, Plan


def write_results(plan: Plan, metric: str | None, failures: list[str]) -> list[str]:
    """Write what is finished; return the failures and what the test of other runs lacks.

    Both are below the table. The metric is by default the first that the test returns.
    """
    finished = [run for run in plan.runs() if run.is_finished()]
    results = [json.loads((run.folder / RESULT).read_text()) for run in finished]
    table = ""
    faults = list(failures)
    if results:
        metric = metric or next(iter(results[0]["metrics"]))
        values, lacking = values_by_seed(plan, results, metric)
        faults += lacking
        table = make_table(values, metric, costs_by_name(plan, results))
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
) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Return a metric of each config by seed, and a fault for each run without a finite one."""
    values = {name: {} for name in plan.names}
    faults = []
    for result in results:
        metrics = result["metrics"]
        if math.isfinite(metrics.get(metric, math.nan)):
            values[result["config"]][result["seed"]] = metrics[metric]
        else:
            run = f"{result['config']}, seed {result['seed']}"
            faults.append(f"{run}: no {metric} in {json.dumps(metrics)}")
    return values, faults


def costs_by_name(plan: Plan, results: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Return what the runs of each config cost, by what is counted."""
    costs = {name: defaultdict(list) for name in plan.names}
    for result in results:
        for key, cost in result["costs"].items():
            costs[result["config"]][key].append(cost)
    return costs


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
