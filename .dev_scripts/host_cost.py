#!/usr/bin/env python
"""Count what a block of layer attention costs the host: `python .dev_scripts/host_cost.py [--against CHECKOUT]`.

Per block of a stage of T layers, forward and backward: microseconds, launches of Triton kernels, and other operations
that a GPU would run. Kernels are compiled for compute capability 9.0 and bound, but a stub stands for the driver, so
nothing is computed and no GPU is needed. Maps are tiny, so that work on them counts for nothing. With --against the
package of another checkout is measured in turn with this one.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from measure import as_markdown
from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.ops import dispatch

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (2, 64, 4, 4)
KINDS = {"light": "MRLALight", "base": "MRLABase"}
DEPTHS = {"light": (1, 3), "base": (1, 2, 3, 4, 5, 6)}


def stub_driver():
    """Make Triton compile for a GPU that is not there; return the list that each launch is added to."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    launched = []
    stub, stub.utils = SimpleNamespace(), SimpleNamespace()
    stub.utils.load_binary = lambda *args: (0, 0, 32, 0, 1024)
    stub.utils.get_device_properties = lambda device: {"max_shared_mem": 2**17, "multiprocessor_count": 132}
    stub.get_current_device, stub.get_current_stream = lambda: 0, lambda device: 0
    stub.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    stub.launcher_cls = lambda source, metadata: lambda *args: launched.append(1)
    driver.set_active(stub)
    return launched


def stage(kind, depth):
    """A function that runs a stage of blocks' ends and returns the last output, and the tensors that learn."""
    torch.manual_seed(0)
    relu = nn.ReLU(inplace=True)
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(depth + 1)]
    options = dict(norm_cfg=dict(type="BN"), zero_init=False)
    branches = [
        LayerAttentionResidual(dict(type=KINDS[kind]), SHAPE[1], first_in_stage=t == 0, **options)
        for t in range(depth if kind in KINDS else 0)
    ]
    for branch in branches:
        branch.norm.eval()

    def run():
        x, memory = inputs[-1], None
        for t in range(depth):
            if branches:
                x, memory = branches[t].forward_add_relu(inputs[t], x, relu, memory)
            else:
                x = relu(inputs[t] + x)
        return x

    return run, [*inputs, *(parameter for branch in branches for parameter in branch.parameters())]


def count_operations(function):
    """Operations that a GPU would run: all but views and allocations."""

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
            Count.total += not view and "empty" not in name and name not in ("detach", "_local_scalar_dense")
            return func(*args, **(kwargs or {}))

    with Count():
        found = function()
    return found, Count.total


def cases():
    """Names and settings of the rows: kind, depth, path."""
    rows = {"add and ReLU": ("plain", 3, "fused")}
    for path in ("naive", "fused", "triton"):
        rows |= {f"{kind}, {path}, T={t}": (kind, t, path) for kind in KINDS for t in DEPTHS[kind]}
    return rows


def work():
    """Answer requests on stdin, a case each, by its figures on stdout."""
    answer, sys.stdout = sys.stdout, sys.stderr
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    launched = stub_driver()
    dispatch.why_triton_fails = lambda *key: ""
    stages = {name: stage(kind, depth) for name, (kind, depth, _) in cases().items()}
    for line in sys.stdin:
        name, repeats = json.loads(line)
        _, depth, os.environ["MRLA_OPS"] = cases()[name]
        (run, leaves), grad, seconds = stages[name], torch.randn(SHAPE), []
        for _ in range(repeats):
            for leaf in leaves:
                leaf.grad = None  # as optimizers do
            start = time.perf_counter()
            y = run()
            middle = time.perf_counter()
            y.backward(grad)
            seconds.append((middle - start, time.perf_counter() - middle))
        found = [1e6 * min(part) / depth for part in zip(*seconds, strict=True)]
        for leaf in leaves:
            leaf.grad = None
        launched.clear()
        y, operations = count_operations(run)
        found += [len(launched) / depth, operations / depth]
        launched.clear()
        _, operations = count_operations(lambda y=y, grad=grad: y.backward(grad))
        answer.write(json.dumps([*found, len(launched) / depth, operations / depth]) + "\n")
        answer.flush()


def main():
    """Ask a worker per checkout for all cases in turn; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of the package")
    parser.add_argument("--rounds", type=int, default=5, help="times that each case is measured; the least counts")
    parser.add_argument("--repeats", type=int, default=60, help="steps of a case in each round")
    args = parser.parse_args()
    workers = {}
    for name, root in (("before", args.against), ("now", ROOT)):
        if root:
            command = [sys.executable, "-c", "import host_cost; host_cost.work()"]
            path = os.pathsep.join([str(root), str(ROOT / ".dev_scripts")])
            workers[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def ask(worker, *request):
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    found = {(case, name): [] for case in cases() for name in workers}
    for _ in range(args.rounds):
        for case, name in found:
            found[case, name].append(ask(workers[name], case, args.repeats))
    rows = {case: {"per block": case} for case in cases()}
    for (case, name), figures in found.items():
        forward, backward, *counts = (min(part) for part in zip(*figures, strict=True))
        rows[case][f"{name}: us"] = f"{forward:.0f} / {backward:.0f}"
        for index, title in enumerate(("launches", "operations")):
            rows[case][f"{name}: {title}"] = f"{counts[index]:.3g} / {counts[index + 2]:.3g}"
    print(as_markdown([*rows.values()]))
    for worker in workers.values():
        worker.stdin.close()


if __name__ == "__main__":
    main()
