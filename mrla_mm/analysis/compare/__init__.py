"""Configs trained and tested from several seeds: planned, run side by side, and put in a table.

A run is a folder `<out>/<config>/seed_<n>` beside `<config>.py`, the config as it runs. Its files
say how far it is, and the next call goes on from there:

* `last_checkpoint`, written by mmengine's checkpoint hook: the training has begun;
* `trained.json`: the training has ended; what it cost;
* `result.json`: the test has ended too, so the run is finished; its metrics and costs.
"""

from mrla_mm.analysis.compare.plan import Plan, make_plan
from mrla_mm.analysis.compare.processes import find_slots, run_all
from mrla_mm.analysis.compare.results import write_results
