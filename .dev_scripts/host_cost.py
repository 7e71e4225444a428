#!/usr/bin/env python
"""Count what a block of layer attention costs the host: `python .dev_scripts/host_cost.py`.

Per block of a stage of T layers, forward and backward: microseconds, and launches of Triton
kernels. They are compiled for compute capability 9.0, and a stub stands for the driver: it needs
no GPU. Maps are tiny, so that work on them counts for nothing. PYTHONPATH can name another package.
"""

import os
import time
import warnings
from types import SimpleNamespace

import torch
from torch import nn

from measure import as_markdown
from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.ops import dispatch, proof

SHAPE = (2, 64, 4, 4)
KINDS = {"light": "MRLALight", "base": "MRLABase"}
STEPS = 300  # of a case; the fastest counts
DEPTHS = {"light": (1, 3), "base": (1, 2, 3, 4, 5, 6)}


def stub_driver():
    """Make Triton compile for a GPU that is not there; return the launches' arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    launched = []
    stub, stub.utils = SimpleNamespace(), SimpleNamespace()
    stub.utils.load_binary = lambda *args: (0, 0, 32, 0, 1024)
    properties = {"max_shared_mem": 2**17, "multiprocessor_count": 132}
    stub.utils.get_device_properties = lambda device: properties
    stub.get_current_device, stub.get_current_stream = lambda: 0, lambda device: 0
    stub.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    stub.launcher_cls = lambda source, metadata: lambda *args: launched.append(args)
    driver.set_active(stub)
    return launched


def stage(kind, depth):
    """A function that runs the ends of a stage's blocks, and the tensors that learn."""
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
        x, memory = inputs[-1], ()
        for t in range(depth):
            if branches:
                x, *memory = branches[t].forward_add_relu(inputs[t], x, relu, *memory)
            else:
                x = relu(inputs[t] + x)
        return x

    return run, [*inputs, *(parameter for branch in branches for parameter in branch.parameters())]


def cases():
    """Names and settings of the rows: kind, depth, path."""
    rows = {"add and ReLU": ("plain", 3, "fused")}
    for path in ("naive", "fused", "triton"):
        rows |= {f"{kind}, {path}, T={t}": (kind, t, path) for kind in KINDS for t in DEPTHS[kind]}
    return rows


def measure(kind, depth, launched):
    """Microseconds and launches per block, each forward and backward."""
    (run, leaves), grad, seconds = stage(kind, depth), torch.randn(SHAPE), []
    for _ in range(STEPS):
        launched.clear()  # and with it the tensors that it holds
        for leaf in leaves:
            leaf.grad = None  # as optimizers do
        start = time.perf_counter()
        y = run()
        middle = time.perf_counter()
        forward = len(launched)
        y.backward(grad)
        seconds.append((middle - start, time.perf_counter() - middle))
    launches = forward, len(launched) - forward
    microseconds = [1e6 * min(part) for part in zip(*seconds, strict=True)]
    return [[value / depth for value in pair] for pair in (microseconds, launches)]


def main():
    """Measure all cases; print the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    launched, rows = stub_driver(), []
    dispatch.why_not_triton = lambda x: ""
    proof.SELF_CHECKS.clear()
    for name, (kind, depth, os.environ["MRLA_OPS"]) in cases().items():
        microseconds, launches = measure(kind, depth, launched)
        row = {"per block": name, "us": "{:.0f} / {:.0f}".format(*microseconds)}
        row["launches"] = "{:.3g} / {:.3g}".format(*launches)
        rows.append(row)
    print(as_markdown(rows))


if __name__ == "__main__":
    main()
