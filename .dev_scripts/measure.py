"""Measure steps against each other: time, memory, and tables of them.

The steps of a comparison are timed in rounds, each step once per round, and compared by the median
over the rounds of the ratio within a round. Whatever slows the machine for a while slows all steps
of that round, and cancels out.
"""

import csv
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once(step: Callable[[], object], device: torch.device, clock: str = "wall") -> float:
    """Return the seconds that a step takes, by the wall or in processor time ("cpu")."""
    synchronize(device)
    start = CLOCKS[clock]()
    step()
    synchronize(device)
    return CLOCKS[clock]() - start


def time_rounds(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, clock: str
) -> dict[str, list[float]]:
    """Time each step once per round, in turn, after a round that is not timed."""
    seconds = {name: [] for name in steps}
    for _ in range(1 + rounds):
        for name, step in steps.items():
            seconds[name].append(time_once(step, device, clock))
    return {name: found[1:] for name, found in seconds.items()}


def ratio(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the median over rounds of seconds / base, and half its interquartile range."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    spread = 0.0
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        spread = (high - low) / 2
    return statistics.median(ratios), spread


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


def busy_seconds(step: Callable[[], object], device: torch.device, steps: int = 3) -> float:
    """Seconds a step for which kernels, copies and fills keep a GPU busy, by torch's profiler."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        for _ in range(steps):
            step()
        synchronize(device)
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    busy = [e.time_range.elapsed_us() for e in events if not e.is_user_annotation]
    return sum(busy) / 1e6 / steps


def describe_machine(device: torch.device) -> str:
    """Hardware, versions and date that figures belong to."""
    name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = [f"{package} {version(package)}" for package in ("torch", "mmengine", "mmdet")]
    return ", ".join([name, f"Python {platform.python_version()}", *versions, str(date.today())])


def show(cell: object) -> str:
    """Return a cell of a table, three digits of a float."""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def as_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a Markdown table; the columns are the keys in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    shown = [[show(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *shown])


def write_report(out: Path, settings: Mapping, rows: Sequence[Mapping[str, object]]) -> str:
    """Write report.csv and report.md, which names machine and settings; return the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "report.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: show(cell) for key, cell in row.items()} for row in rows)
    given = ", ".join(f"{key}={value}" for key, value in settings.items() if value)
    report = f"{describe_machine(settings['device'])}\n\n{given}\n\n{as_markdown(rows)}\n"
    (out / "report.md").write_text(report)
    return report
