#!/usr/bin/env python
"""Measure what layer attention costs: `python tools/benchmark.py [SUITE ...] [options]`.

Suites (default: goals, oom, branch, depth):
  goals       step time and memory of light on ResNet-50 and base on ResNet-101 against the plain backbone
  oom         MLA, base and light on ResNet-50 and -101, the paper's memory table: step time and memory
  branch      the light branch alone: achieved share of the memory bandwidth, on a GPU without the time of launches
  depth       one stage of T layers: growth of time and memory with T
  resolution  light on ResNet-50: growth of time and memory with the number of pixels
  models      what --config or --depth and --attention name

Paths: plain (no layer attention), plain with folded norms (the same with its frozen norms in the convolutions' weights,
where MRLAResNet has its own), straightforward (the equations typed in, every product a tensor), reference, folded,
triton. Before a path is timed, its outputs and gradients are compared with the reference's. Memory is, on a GPU, the
peak allocated during the step beyond what was there before it; on a CPU, the bytes of all tensors kept for backward.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import torch
from torch import nn

from mrla_mm import cli
from mrla_mm.analysis import benchmark
from mrla_mm.analysis.paths import PATHS, take_path, usable_paths, wake
from mrla_mm.analysis.steps import Step, build_backbone, build_detector, check_paths, fold_norms
from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.errors import InputError

SUITES = ("goals", "oom", "branch", "depth", "resolution", "models")
ATTENTION = {"light": "MRLALight", "base": "MRLABase", "mla": "MLA", "linear": "LinearRLA"}
STAGES = ((256, 4), (512, 8), (1024, 16), (2048, 32))  # ResNet-50: channels and stride


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="what to measure, see above")
    parser.add_argument("--config", help="detector config for the suite models, or package::name of a packed one")
    parser.add_argument("--depth", type=int, default=50, help="ResNet depth for the suite models")
    parser.add_argument("--attention", choices=ATTENTION, default="light", help="variant for the suite models")
    parser.add_argument("--norm", choices=["frozen", "batch"], default="frozen", help="statistics, suite models")
    parser.add_argument("--mode", choices=["train", "infer"], default="train", help="forward and backward, or forward")
    parser.add_argument("--compile", action="store_true", help="also measure under torch.compile (suite models)")
    parser.add_argument("--paths", nargs="+", choices=PATHS[1:], help="default: all that can run here")
    parser.add_argument("--batch-size", type=int, help="default: 8 on a CPU, 64 on a GPU; 2 for a detector")
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("H", "W"), help="default: 224 224; 800 1344 for a detector"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed repeats")
    parser.add_argument("--amp", action="store_true", help="autocast: float16 on a GPU, bfloat16 on a CPU")
    parser.add_argument("--channels-last", action="store_true", help="weights and images in channels-last layout")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument(
        "--clock",
        choices=benchmark.CLOCKS,
        default="wall",
        help="cpu: processor seconds of this process, for a busy machine (use with OMP_NUM_THREADS=1)",
    )
    parser.add_argument("--out", type=Path, default=Path("work_dirs/benchmark"), help="folder for report.json and .md")
    args = parser.parse_args(argv)
    unknown = [suite for suite in args.suites if suite not in SUITES]
    if unknown:
        raise InputError(f"suite {unknown[0]!r} is unknown; use some of {', '.join(SUITES)}")
    for name in ("rounds", "batch_size", "depth"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: give a positive number")
    args.suites = args.suites or ["goals", "oom", "branch", "depth"]
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    args.batch_size = args.batch_size or (2 if args.config else 64 if args.device.type == "cuda" else 8)
    args.size = args.size or ([800, 1344] if args.config else [224, 224])
    if args.clock == "cpu" and args.device.type == "cuda":
        raise InputError("--clock cpu does not see a GPU's time; use --clock wall")
    return args


def measure(title, make_plain, make_ours, args, *, attention, paths=None, detector=False):
    """Time and weigh the paths of one model against the plain backbone; return a row per path."""
    plain, ours = (Step(make(), args, detector=detector) for make in (make_plain, make_ours))
    paths = paths or usable_paths(attention, args.device, args.paths)
    errors = check_paths(ours, paths, args)

    def run(path):
        take_path(ours.model, path)
        return ours()

    plains = {"plain": plain}
    if folded_plain := fold_norms(Step(make_plain(), args, detector=detector)):
        plains["plain, folded norms"] = folded_plain
    steps = plains | {path: (lambda path=path: run(path)) for path in paths}
    seconds = benchmark.time_rounds(steps, args.rounds, device=args.device, clock=args.clock, title=title)
    rows = []
    for name in steps:
        take_path(ours.model, name if name in paths else "plain")
        rows.append(row_of(title, name, seconds, plains.get(name, ours), args, errors.get(name)))
    for row in rows:
        row["memory ratio"] = row["MiB"] / rows[0]["MiB"] if rows[0]["MiB"] else ""
    return rows


def row_of(title, name, seconds, step, args, error):
    """One line of a table."""
    return {
        "model": title,
        "path": name,
        "ms": 1e3 * statistics.median(seconds[name]),
        "images/s": args.batch_size / statistics.median(seconds[name]),
        "time ratio": benchmark.median_ratio(seconds[name], seconds["plain"]),
        "+-": benchmark.spread(seconds[name], seconds["plain"]),
        "MiB": round(step.memory() / 2**20),
        "error": error if error is not None else "",
    }


def measure_compiled(title, make_plain, make_ours, args, *, attention, detector=False):
    """Rows under torch.compile, each path with a plain backbone of its own: compiled code does not change path."""
    rows = []
    for path in usable_paths(attention, args.device, args.paths):
        torch.compiler.reset()
        plain, ours = (Step(make(), args, detector=detector, compiled=True) for make in (make_plain, make_ours))
        take_path(ours.model, path)
        steps = {"plain": plain, path: ours}
        seconds = benchmark.time_rounds(
            steps, args.rounds, device=args.device, clock=args.clock, warm_up=2, title=f"{title}, {path}"
        )
        rows += [row_of(title, name, seconds, steps[name], args, None) for name in steps]
    return rows


def measure_resnet(depth, kind, norm, args, **kwargs):
    """Rows of one variant on one ResNet."""
    title = f"R{depth} {kind}, {norm} statistics"
    attention = ATTENTION[kind]
    makers = (lambda: build_backbone(depth, None, norm), lambda: build_backbone(depth, attention, norm))
    return measure(title, *makers, args, attention=attention, **kwargs)


def goals(args):
    """Light on ResNet-50 with frozen and batch statistics, base and light on ResNet-101."""
    rows = measure_resnet(50, "light", "frozen", args) + measure_resnet(50, "light", "batch", args)
    fast = [usable_paths("MRLABase", args.device, args.paths)[-1]]
    base = measure_resnet(101, "base", "frozen", args, paths=fast)
    light = measure_resnet(101, "light", "frozen", args, paths=fast)
    over = {"model": "R101, base over light", "path": fast[0], "memory ratio": base[-1]["MiB"] / light[-1]["MiB"]}
    return {"Goals": [*rows, *base, *light, over]}


def oom(args):
    """Reproduce the paper's memory table: quadratic MLA, base and light as the network gets deeper."""
    rows = []
    for depth in (50, 101):
        for kind in ("mla", "base", "light"):
            paths = [path for path in usable_paths(ATTENTION[kind], args.device, args.paths) if path != "reference"]
            rows += measure_resnet(depth, kind, "frozen", args, paths=paths)[kind != "mla" :]
    return {"MLA, base and light on deeper networks": rows}


def branch(args):
    """Hold the light branch of each stage against the bytes it cannot avoid: 3 maps forward, 5 backward."""
    bandwidth = benchmark.copy_bandwidth(args.device)
    rows = []
    for channels, stride in STAGES:
        dtype = torch.float16 if args.amp and args.device.type == "cuda" else torch.float32
        shape = (args.batch_size, channels, args.size[0] // stride, args.size[1] // stride)
        layer = LayerAttentionResidual(dict(type="MRLALight"), channels, norm_cfg=dict(type="BN"))
        layer = wake(layer).to(args.device).eval()
        x, shortcut, grad = (torch.randn(shape, device=args.device, dtype=dtype) for _ in range(3))
        inputs = [x.requires_grad_(), shortcut.requires_grad_(), *layer.parameters()]

        def run(path, layer=layer, inputs=inputs, grad=grad):
            take_path(layer, path)
            return torch.autograd.grad(layer(inputs[0], inputs[1])[0], inputs, grad)

        steps, allowed = {}, 1e-2 if dtype == torch.float16 else 1e-4
        with benchmark.single_precision():
            expected = run("reference")
            for path in usable_paths("MRLALight", args.device, args.paths):
                benchmark.check_parity(path, run(path)[:2], expected[:2], allowed)
                steps[path] = lambda path=path, run=run: run(path)
        title = "x".join(str(side) for side in shape)
        seconds = benchmark.time_queued(steps, 3 * args.rounds, device=args.device, clock=args.clock, title=title)
        floor = 8 * x.nbytes / bandwidth
        for path, found in seconds.items():
            best = statistics.median(found)
            rows.append({"map": title, "path": path, "ms": 1e3 * best, "share of bandwidth": floor / best})
    return {f"Light branch, copy bandwidth {bandwidth / 1e9:.1f} GB/s": rows}


class Stage(nn.Module):
    """T residual branches with nothing between them, for growth with depth."""

    def __init__(self, kind, depth, channels):
        super().__init__()
        cfg = dict(type=ATTENTION[kind])
        self.layers = nn.ModuleList(
            LayerAttentionResidual(cfg, channels, norm_cfg=dict(type="BN"), first_in_stage=t == 0) for t in range(depth)
        )
        wake(self)

    def train(self, mode=True):
        """Keep the statistics frozen."""
        return super().train(False)

    def forward(self, x):
        """Run the layers on one map; its gradient is wanted too."""
        x, memory = x.requires_grad_(), None
        for layer in self.layers:
            x, memory = layer(x, x, memory)
        return (x,)


def sweep(title, steps_of, sizes, args, paths, label):
    """Rows of time and memory over sizes and the fitted exponents."""
    rows = []
    for path in paths:
        times, weights = [], []
        for size in sizes:
            step = steps_of(size)
            take_path(step.model, path)
            seconds = benchmark.time_rounds(
                {path: step}, args.rounds, device=args.device, clock=args.clock, title=f"{title}, {path}, {size}"
            )
            times.append(statistics.median(seconds[path]))
            weights.append(max(step.memory(), 1))
        growth = [f"{label}^{benchmark.fit_exponent(sizes, amounts):.2f}" for amounts in (times, weights)]
        for size, seconds_, weight in zip(sizes, times, weights, strict=True):
            rows.append({"model": title, "path": path, label: size, "ms": 1e3 * seconds_, "MiB": round(weight / 2**20)})
            rows[-1] |= {"time grows as": growth[0], "memory grows as": growth[1]}
    return rows


def depth_sweep(args):
    """One stage of T layers at 1024 channels and 14 x 14, ResNet-101's third."""

    class StageStep(Step):
        def draw(self, batch, height, width):
            return torch.randn(batch, 1024, height // 16, width // 16, device=self.args.device)

    rows = []
    for kind in ("light", "base", "mla"):
        paths = [path for path in usable_paths(ATTENTION[kind], args.device, args.paths) if path != "reference"]
        make = lambda depth, kind=kind: StageStep(Stage(kind, depth, 1024), args)  # noqa: E731
        rows += sweep(f"stage of T {kind} layers", make, (4, 8, 16, 23), args, paths, "T")
    return {"Growth with the depth of a stage": rows}


def resolution_sweep(args):
    """Light on ResNet-50 at growing images."""

    def make(pixels, attention):
        side = round(pixels**0.5)
        sized = argparse.Namespace(**{**vars(args), "size": [side, side]})
        return Step(build_backbone(50, attention, "frozen"), sized)

    sizes = [side * side for side in (128, 192, 256, 320)]
    rows = sweep("R50 plain", lambda n: make(n, None), sizes, args, ["plain"], "pixels")
    paths = usable_paths("MRLALight", args.device, args.paths)
    return {
        "Growth with resolution": rows
        + sweep("R50 light", lambda n: make(n, "MRLALight"), sizes, args, paths, "pixels")
    }


def models(args):
    """What the user named, eager and, if asked for, compiled."""
    if args.config:
        cfg = cli.read_config(args.config, {})
        title = Path(args.config).stem
        attention = cfg.model.backbone.get("layer_attention", {}).get("type", "MRLALight")
        makers = [lambda plain=plain: build_detector(cfg, plain) for plain in (True, False)]
    else:
        title, attention = f"R{args.depth} {args.attention}, {args.norm} statistics", ATTENTION[args.attention]
        makers = [lambda kind=kind: build_backbone(args.depth, kind, args.norm) for kind in (None, attention)]
    options = dict(attention=attention, detector=bool(args.config))
    tables = {f"{args.mode}, eager": measure(title, *makers, args, **options)}
    if args.compile:
        tables[f"{args.mode}, compiled"] = measure_compiled(title, *makers, args, **options)
    return tables


RUN = dict(goals=goals, oom=oom, branch=branch, depth=depth_sweep, resolution=resolution_sweep, models=models)


def main(argv=None):
    """Run the suites; write and print the report after each."""
    args = parse_args(argv)
    asked, tables, text = os.environ.get("MRLA_OPS"), {}, ""
    settings = dict(batch=args.batch_size, size="x".join(map(str, args.size)), rounds=args.rounds, clock=args.clock)
    settings |= dict(precision="autocast" if args.amp else "float32")
    try:
        for suite in args.suites:
            tables |= RUN[suite](args)
            text = benchmark.write_report(args.out, benchmark.describe_machine(args.device, **settings), tables)
    finally:
        os.environ.pop("MRLA_OPS", None)
        if asked is not None:
            os.environ["MRLA_OPS"] = asked
    print(text)
    print(f"report.md and report.json are in {args.out}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
