"""Measure steps against each other: time, memory, growth, and tables of them.

The steps of a comparison are timed in rounds, each step once per round, and compared by the median
over the rounds of the ratio within a round. Whatever slows the machine for a while slows all steps
of that round, and cancels out.
"""

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import distributions
from pathlib import Path

import torch
from torch import Tensor, nn

from mrla_mm.errors import InputError

PACKAGES = ("torch", "torchvision", "triton", "mmengine", "mmdet")
QUEUED = 8  # repeats of a step queued on the GPU at once
BUSY_CYCLES = 10**8  # keeps the GPU busy for about 50 ms, in which the host launches them
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_rounds(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    device: torch.device,
    clock: str = "wall",
    warm_up: int = 1,
    queued: bool = False,
    title: str = "",
) -> dict[str, list[float]]:
    """Time each step once per round, in turn.

    Args:
        steps: what to time, by name.
        rounds: timed rounds.
        device: where the steps run.
        clock: "wall", or "cpu" for processor seconds of this process.
        warm_up: rounds run before, not timed.
        queued: on a GPU, time several repeats by the GPU's clock without waiting for the host, so
            that the time to launch kernels does not count.
        title: printed first.

    Returns:
        dict: seconds by step, one number per round.
    """
    read = CLOCKS[clock]

    def time_one(step):
        synchronize(device)
        start = read()
        step()
        synchronize(device)
        return read() - start

    def time_queued(step):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        for _ in range(QUEUED):
            step()
        end.record()
        synchronize(device)
        return begin.elapsed_time(end) / 1e3 / QUEUED

    time_step = time_queued if queued and device.type == "cuda" else time_one
    seconds = {name: [] for name in steps}
    sys.stderr.write(f"{title}\n")
    for _ in range(warm_up + rounds):
        for name, step in steps.items():
            seconds[name].append(time_step(step))
    return {name: found[warm_up:] for name, found in seconds.items()}


def ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """How many times as long as the base step a step took in each round."""
    return [a / b for a, b in zip(seconds, base, strict=True)]


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles; 0 for fewer than 4 values."""
    if len(values) < 4:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def saved_bytes(forward: Callable[[], object], modules: nn.Module | Sequence[Tensor]) -> int:
    """Bytes that a forward pass saves for backward, without parameters and buffers."""
    owned = modules
    if isinstance(modules, nn.Module):
        owned = [*modules.parameters(), *modules.buffers()]
    exempt = {tensor.untyped_storage().data_ptr() for tensor in owned}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in exempt:
            held[storage.data_ptr()] = storage
        return tensor.detach()  # else a function that saves its own output keeps itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(storage.nbytes() for storage in held.values())
    del result  # kept until here: storages freed on the way could be counted twice
    return total


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Peak GPU memory of a step, beyond what was allocated before it."""
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.rand(2**26, device=device)  # 256 MiB
    target = torch.empty_like(source)
    steps = {"copy": lambda: target.copy_(source)}
    seconds = time_rounds(steps, 7, device=device, queued=True, title="copy bandwidth")["copy"]
    return 2 * source.nbytes / statistics.median(seconds)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest of ``|found - expected| / |expected|`` over the tensors; infinite where it is NaN."""
    worst = 0.0
    for got, wanted in zip(found, expected, strict=True):
        got, wanted = got.double(), wanted.double()
        error = float((got - wanted).norm() / wanted.norm().clamp_min(1e-12))
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def check_parity(
    name: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> float:
    """Return the relative error of a path's results against the naive path's.

    Raises:
        InputError: the error exceeds the tolerance: the speed of a wrong result is never printed.
    """
    error = relative_error(found, expected)
    if not error <= tolerance:
        limit = f"allowed {tolerance:.0e}"
        raise InputError(f"{name} differs from the naive path by {error:.1e} ({limit})")
    return error


def fit_exponent(sizes: Sequence[float], amounts: Sequence[float]) -> float:
    """Exponent e of the growth amount ~ size^e, fitted by least squares in logarithms."""
    logs = ([math.log(value) for value in values] for values in (sizes, amounts))
    return statistics.linear_regression(*logs).slope


def describe_machine(device: torch.device, **settings: object) -> dict[str, object]:
    """Hardware, versions, date and settings that figures belong to."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    found = dict(device=name, date=str(date.today()), python=platform.python_version())
    installed = {each.name: each.version for each in distributions()}
    return found | {name: installed.get(name, "absent") for name in PACKAGES} | settings


def show(cell: object) -> str:
    """Return a cell of a table, three digits of a float."""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def as_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a Markdown table; the columns are the keys in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    shown = [[show(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *shown])


def write_report(
    out: Path, machine: Mapping[str, object], tables: Mapping[str, Sequence[Mapping]]
) -> str:
    """Write report.json and report.md to a folder; return the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    head = ", ".join(f"{key} {value}" for key, value in machine.items())
    parts = [head, *(f"## {title}\n\n{as_markdown(rows)}" for title, rows in tables.items())]
    text = "\n\n".join(parts) + "\n"
    (out / "report.md").write_text(text)
    (out / "report.json").write_text(json.dumps(dict(machine=machine, tables=tables), indent=1))
    return text
