"""Configs trained and tested from several seeds: planned, run side by side, and put in a table."""

from mrla_mm.compare.plan import Plan, make_plan, reserve
from mrla_mm.compare.results import write_results
from mrla_mm.compare.run import find_slots, run_all

__all__ = ["Plan", "find_slots", "make_plan", "reserve", "run_all", "write_results"]
