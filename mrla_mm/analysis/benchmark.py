"""Measuring steps against each other: time, memory, growth, and tables of them.

Steps are timed in rounds, each step once a round, and compared by the median over the rounds of the ratio within a
round: what slows the machine for a while slows all steps of a round, and drops out.
"""

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from mmengine.utils import ProgressBar
from torch import Tensor, nn

from mrla_mm.errors import InputError

PACKAGES = ("torch", "torchvision", "triton", "mmengine", "mmdet")
QUEUED = 8  # repeats of a step that a GPU runs one after the other,
BUSY_CYCLES = 10**8  # and how long it is kept busy before, 50 ms, in which the host launches them
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_rounds(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    device: torch.device,
    clock: str = "wall",
    warm_up: int = 1,
    title: str = "",
) -> dict[str, list[float]]:
    """Time each step once a round, in turn: seconds by step, one number per round."""
    read = CLOCKS[clock]

    def time_one(step):
        synchronise(device)
        start = read()
        step()
        synchronise(device)
        return read() - start

    return in_rounds(steps, rounds, time_one, warm_up=warm_up, title=title)


def time_queued(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    device: torch.device,
    clock: str = "wall",
    title: str = "",
) -> dict[str, list[float]]:
    """Time each step by the GPU's clock, once a round: what the host needs to launch it does not count.

    A few repeats of the step are queued while the GPU is kept busy, then run without waiting for the host.

    Returns:
        dict: seconds by step, one number per round; on a CPU those of `time_rounds`.
    """
    if device.type != "cuda":
        return time_rounds(steps, rounds, device=device, clock=clock, title=title)

    def time_one(step):
        with torch.cuda.device(device):
            torch.cuda._sleep(BUSY_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(QUEUED):
                step()
            end.record()
            synchronise(device)
        return begin.elapsed_time(end) / 1e3 / QUEUED

    return in_rounds(steps, rounds, time_one, warm_up=1, title=title)


def in_rounds(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    time_one: Callable[[Callable[[], object]], float],
    *,
    warm_up: int,
    title: str,
) -> dict[str, list[float]]:
    """Let `time_one` time each step once a round, in turn, with a progress bar; rounds of warm-up are left out."""
    seconds = {name: [] for name in steps}
    sys.stderr.write(f"{title}\n")
    bar = ProgressBar((warm_up + rounds) * len(steps), bar_width=30, file=sys.stderr)
    for _ in range(warm_up + rounds):
        for name, step in steps.items():
            seconds[name].append(time_one(step))
            bar.update()
    sys.stderr.write("\n")
    return {name: found[warm_up:] for name, found in seconds.items()}


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Median over the rounds of how much longer a step took than the base step of the same round."""
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def spread(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Half the distance between the quartiles of the ratios, a measure of the noise; 0 for fewer than 4 rounds."""
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    if len(ratios) < 4:
        return 0.0
    low, _, high = statistics.quantiles(ratios, n=4)
    return (high - low) / 2


def kept_bytes(forward: Callable[[], object], modules: nn.Module | Sequence[Tensor]) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, each storage once, parameters left out."""
    owned = [*modules.parameters(), *modules.buffers()] if isinstance(modules, nn.Module) else modules
    exempt = {tensor.untyped_storage().data_ptr() for tensor in owned}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in exempt:
            held[storage.data_ptr()] = storage
        return tensor.detach()  # an output that its own function keeps would hold itself, and never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(storage.nbytes() for storage in held.values())
    del result
    return total


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Most memory that a step had allocated on a GPU at any time beyond what was allocated before it."""
    synchronise(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronise(device)
    return torch.cuda.max_memory_allocated(device) - before


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes: the ceiling that a branch's passes are held against."""
    source = torch.rand(2**26, device=device)  # 256 MiB
    target = torch.empty_like(source)
    seconds = time_queued({"copy": lambda: target.copy_(source)}, 7, device=device, title="copy bandwidth")["copy"]
    return 2 * source.nbytes / statistics.median(seconds)


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest over the tensors of ``|found - expected| / |expected|``; NaN becomes infinite."""
    worst = 0.0
    for got, wanted in zip(found, expected, strict=True):
        error = float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-12))
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def single_precision() -> AbstractContextManager:
    """Context in which convolutions of a GPU do not round to TF32, as they do by default when they are timed.

    Paths compute the gate in different operations, of which not all would round.
    """
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def check_parity(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """Return the error of a step's results, outputs and gradients, against the reference's.

    Raises:
        InputError: the error is above the tolerance, so that no speed of a wrong result is ever printed.
    """
    error = relative_error(found, expected)
    if not error <= tolerance:
        raise InputError(f"{name} differs from the reference by {error:.1e} (allowed {tolerance:.0e}): not measured")
    return error


def fit_exponent(sizes: Sequence[float], amounts: Sequence[float]) -> float:
    """Exponent e of the growth amount ~ size^e, the least-squares slope in logarithms."""
    xs, ys = [math.log(size) for size in sizes], [math.log(amount) for amount in amounts]
    mean_x, mean_y = statistics.mean(xs), statistics.mean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def describe_machine(device: torch.device, **settings: object) -> dict[str, object]:
    """Hardware, versions and date that figures belong to."""
    cores = f"{torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU, {cores}"
    found = dict(device=name, date=str(date.today()), python=platform.python_version())
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found | settings


def as_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a Markdown table; the columns are the keys in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def line(cells):
        return f"| {' | '.join(cells)} |"

    def show(value):
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    body = [line(show(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join([line(columns), line("---" for _ in columns), *body])


def write_report(out: Path, machine: Mapping[str, object], tables: Mapping[str, Sequence[Mapping]]) -> str:
    """Write report.json and report.md to a folder; return the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    head = ", ".join(f"{key} {value}" for key, value in machine.items())
    parts = [head, *(f"## {title}\n\n{as_markdown(rows)}" for title, rows in tables.items())]
    text = "\n\n".join(parts) + "\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    (out / "report.json").write_text(json.dumps(dict(machine=machine, tables=tables), indent=1), encoding="utf-8")
    return text
