#!/usr/bin/env python
"""Measure what layer attention costs: `python .dev_scripts/benchmark.py [SUITE ...] [options]`.

Suites (default: goals, oom, branch, depth):
  goals     step time and memory of light on ResNet-50 and base on ResNet-101 over plain ones
  oom       the same of MLA, base and light on ResNet-50 and -101: the paper's memory table
  branch    the light branch alone: achieved share of the memory bandwidth
  depth     one stage of T layers: growth of time and memory with T, and multiply-adds of an image
  backbone  the ResNet that --depth, --attention and --norm name
  compiled  the same under torch.compile
  anywhere  backbones of mmdet and mmpretrain through WithLayerAttention over plain ones
  detector  the detector that --config names, at 800 x 1344
  comparators  the other attention modules of the paper's tables beside base and light, on ResNet-50

Paths: plain (no layer attention); plain, BN folded (its frozen norms folded into the convolutions,
as MRLAResNet folds its own); naive, fused, numba and triton. Before a path is timed, its loss and
gradients are compared with the naive path's. Memory is, on a GPU, the peak allocated during the
step beyond what was allocated before; on a CPU, the bytes of all tensors saved for backward.
"""

import argparse
import collections
import statistics
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import torch
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import measure
from comparators import comparators
from mrla_mm import cli
from mrla_mm.analysis.complexity import OperationCounter
from mrla_mm.attention import LayerAttentionResidual, residual, tokens
from mrla_mm.attention.fusion import choose_fusion
from mrla_mm.config import read_config
from mrla_mm.errors import InputError
from steps import (
    PATHS,
    Step,
    build_backbone,
    build_detector,
    check_paths,
    fold_norms,
    randomize_zero_init,
    set_path,
    usable_paths,
)

ATTENTION = {"light": "MRLALight", "base": "MRLABase", "mla": "MLA", "linear": "LinearRLA"}
MAPS = dict(out_indices=(0, 1, 2, 3))
HOSTS = {  # with frozen statistics where detectors freeze them
    "ResNeXt-50": dict(type="mmdet.ResNeXt", depth=50, groups=32, base_width=4),
    "RegNetX-3.2GF": dict(type="mmdet.RegNet", arch="regnetx_3.2gf"),
    "HRNet-W18": "mmdet::hrnet/faster-rcnn_hrnetv2p-w18-1x_coco.py",
    "CSPNeXt-s": dict(type="mmdet.CSPNeXt", deepen_factor=0.33, widen_factor=0.5),
    "ConvNeXt-T": dict(type="mmpretrain.ConvNeXt", gap_before_final_norm=False, **MAPS),
    "Swin-T": dict(type="mmdet.SwinTransformer", drop_path_rate=0.0),
    "Swin-T, mmpretrain": dict(type="mmpretrain.SwinTransformer", drop_path_rate=0.0),
    "MSCAN-T": dict(
        type="mmseg.MSCAN",
        embed_dims=[32, 64, 160, 256],
        depths=[3, 3, 5, 2],
        norm_cfg=dict(type="BN"),
    ),
    "VAN-B0": dict(type="mmpretrain.VAN", arch="tiny", drop_path_rate=0.0),
    "MobileNetV3-large": dict(type="mmpretrain.MobileNetV3", arch="large"),
    "RegNetY-800MF": dict(type="mmpretrain.TIMMBackbone", model_name="regnety_008"),
    "DeiT-T": dict(type="MRLAViT", arch="deit-tiny", img_size=224, out_type="featmap"),
    "PVTv2-B0": dict(type="MRLAPVTv2", arch="b0"),
}
STAGES = ((256, 4), (512, 8), (1024, 16), (2048, 32))  # ResNet-50: channels and stride


def parse_args(argv):
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help="what to measure, see above")
    add("--config", help="suite detector: config file, or package::name")
    add("--depth", type=int, default=50, help="suites backbone and compiled: ResNet depth")
    add("--attention", choices=ATTENTION, default="light", help="likewise: variant")
    add("--norm", choices=["frozen", "batch"], default="frozen", help="likewise: statistics")
    add("--paths", nargs="+", choices=PATHS, help="default: all that can run here")
    add("--batch-size", type=int, help="default: 8 on a CPU, 64 on a GPU; 2 for a detector")
    add("--size", type=int, nargs=2, help="height and width (224 224; a detector 800 1344)")
    add("--rounds", type=int, default=7, help="timed repeats")
    add("--amp", action="store_true", help="autocast: float16 on a GPU, bfloat16 on a CPU")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    add("--inference", action="store_true", help="the forward pass alone, in evaluation mode")
    add("--channels-last", action="store_true", help="with the memory layout of that name")
    add("--clock", choices=measure.CLOCKS, default="wall", help="cpu: processor seconds")
    add("--out", type=Path, default=Path("work_dirs/benchmark"), help="folder for the report")
    args = parser.parse_args(argv)
    args.suites = args.suites or ["goals", "oom", "branch", "depth"]
    if unknown := [suite for suite in args.suites if suite not in SUITES]:
        raise InputError(f"suite {unknown[0]!r} is unknown; use some of {', '.join(SUITES)}")
    if "detector" in args.suites and not args.config:
        raise InputError("the suite detector needs --config")
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backbone_images = 64 if args.device.type == "cuda" else 8
    args.batch_size = args.batch_size or (2 if args.config else backbone_images)
    args.size = args.size or ([800, 1344] if args.config else [224, 224])
    return args


def measure_model(title, make_plain, make_ours, args, *, paths=None, detector=False):
    """Time and weigh the paths of one model against the plain one; return a row per path."""
    plain, ours = (Step(make(), args, detector=detector) for make in (make_plain, make_ours))
    paths = paths or usable_paths(args)
    errors = check_paths(ours, paths)
    steps = {"plain": plain}
    if folded := fold_norms(Step(make_plain(), args, detector=detector)):
        steps["plain, BN folded"] = folded
    steps |= dict.fromkeys(paths, ours)
    return rows_of(title, steps, args, errors)


def rows_of(title, steps, args, errors, warm_up=1):
    """Time steps in rounds, each by the path of its name; return a row per step."""

    def run(name):
        set_path(name)
        return steps[name]()

    timed = {name: (lambda name=name: run(name)) for name in steps}
    options = dict(device=args.device, clock=args.clock, warm_up=warm_up, title=title)
    seconds = measure.time_rounds(timed, args.rounds, **options)
    rows = []
    for name, step in steps.items():
        set_path(name)
        median = statistics.median(seconds[name])
        ratios = measure.ratios(seconds[name], seconds["plain"])
        row = {"model": title, "path": name, "ms": 1e3 * median}
        row |= {"images/s": args.batch_size / median}
        row |= {"time ratio": statistics.median(ratios), "+-": measure.spread(ratios)}
        row |= {"MiB": round(step.memory() / 2**20), "error": errors.get(name, "")}
        rows.append(row)
        row["memory ratio"] = row["MiB"] / max(rows[0]["MiB"], 1)
    return rows


def measure_resnet(depth, kind, norm, args, **options):
    """Rows of one variant on one ResNet."""
    plain, ours = (partial(build_backbone, depth, name, norm) for name in (None, ATTENTION[kind]))
    return measure_model(f"R{depth} {kind}, {norm} statistics", plain, ours, args, **options)


def goals(args):
    """Light on ResNet-50 with frozen and batch statistics, base and light on ResNet-101."""
    rows = measure_resnet(50, "light", "frozen", args) + measure_resnet(50, "light", "batch", args)
    fast = usable_paths(args)[-1:]
    for kind in ("base", "light"):
        rows += measure_resnet(101, kind, "frozen", args, paths=fast)
    return {"Goals": rows}


def oom(args):
    """Reproduce the paper's memory table: MLA, base and light as the network gets deeper."""
    rows, fast = [], usable_paths(args)[-1:]
    for depth in (50, 101):
        for kind in ("mla", "base", "light"):
            rows += measure_resnet(depth, kind, "frozen", args, paths=fast)[kind != "mla" :]
    return {"MLA, base and light on deeper networks": rows}


def backbone(args):
    """The ResNet that the command line describes."""
    return {"Backbone": measure_resnet(args.depth, args.attention, args.norm, args)}


def compiled(args):
    """The ResNet of the command line under torch.compile, where the naive path runs."""
    torch.compiler.reset()
    steps = {}
    for name, kind in {"plain": None, "naive": ATTENTION[args.attention]}.items():
        steps[name] = Step(build_backbone(args.depth, kind, args.norm), args, compiled=True)
    title = f"R{args.depth} {args.attention}, {args.norm} statistics, compiled"
    return {"torch.compile": rows_of(title, steps, args, {}, warm_up=2)}


def host(name, attention=False):
    """Build a backbone of HOSTS, plain or with MRLA-light."""
    cfg = HOSTS[name]
    if isinstance(cfg, str):
        cfg = read_config(cfg, {}).model.backbone
    cfg = {key: value for key, value in cfg.items() if key != "init_cfg"}
    is_ours = cfg["type"].startswith("MRLA")
    if is_ours and not attention:
        cfg["layer_attention"] = None
    if attention and not is_ours:
        kind = cfg["type"] if "." in cfg["type"] else f"mmdet.{cfg['type']}"
        cfg |= dict(type="WithLayerAttention", backbone=kind)
    return randomize_zero_init(MODELS.build(cfg))


def anywhere(args):
    """Light in backbones of other families, and how much of their blocks ran fused."""
    rows = []
    fast = usable_paths(args)[-1:]
    init_default_scope("mmdet")
    for name in HOSTS:
        makers = partial(host, name), partial(host, name, attention=True)
        found = measure_model(name, *makers, args, paths=fast)
        found[-1]["fused"] = extents(Step(host(name, attention=True), args))
        rows += found
    return {"Other backbones": rows}


def extents(step):
    """Return in words how many branches of a step ran fused, and how much of them."""
    seen = []

    def watched(*given, **options):
        seen.append(choose_fusion(*given, **options))
        return seen[-1]

    with (
        mock.patch.object(residual, "choose_fusion", watched),
        mock.patch.object(tokens, "choose_fusion", watched),
    ):
        step.forward()
    counts = collections.Counter(fusion.extent for fusion in seen)
    return ", ".join(f"{extent} {count}" for extent, count in counts.items())


def detector(args):
    """The detector of a config against the same detector with a plain ResNet."""
    cfg = read_config(args.config, {})
    makers = [lambda plain=plain: build_detector(cfg, plain=plain) for plain in (True, False)]
    return {"Detector": measure_model(Path(args.config).stem, *makers, args, detector=True)}


def branch(args):
    """Compare the light branch with the maps that the kernels move: 4 forward, 6 backward."""
    bandwidth = measure.copy_bandwidth(args.device)
    dtype = torch.float16 if args.amp and args.device.type == "cuda" else torch.float32
    tolerance = 1e-2 if dtype == torch.float16 else 1e-4
    paths, rows = usable_paths(args), []
    for channels, stride in STAGES:
        shape = (args.batch_size, channels, args.size[0] // stride, args.size[1] // stride)
        layer = LayerAttentionResidual(dict(type="MRLALight"), channels, norm_cfg=dict(type="BN"))
        layer = randomize_zero_init(layer).to(args.device).eval()
        x, shortcut, grad = (torch.randn(shape, device=args.device, dtype=dtype) for _ in range(3))
        inputs = [x.requires_grad_(), shortcut.requires_grad_(), *layer.parameters()]

        def run(path, layer=layer, inputs=inputs, grad=grad):
            set_path(path)
            with torch.autocast("cuda", enabled=dtype == torch.float16):
                out, *_ = layer(inputs[0], inputs[1])
            return torch.autograd.grad(out, inputs, grad)

        steps = {path: partial(run, path) for path in paths}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            expected = run("naive")[:2]
            for path, step in steps.items():
                measure.check_parity(path, step()[:2], expected, tolerance)
        title = "x".join(map(str, shape))
        options = dict(device=args.device, clock=args.clock, queued=True, title=title)
        for path, found in measure.time_rounds(steps, 3 * args.rounds, **options).items():
            median = statistics.median(found)
            row = {"map": title, "path": path, "ms": 1e3 * median}
            rows.append(row | {"share of bandwidth": 10 * x.nbytes / bandwidth / median})
    return {f"Light branch, copy bandwidth {bandwidth / 1e9:.1f} GB/s": rows}


class Stage(nn.Module):
    """T residual branches with nothing between them and frozen statistics."""

    def __init__(self, kind, depth, channels):
        super().__init__()
        cfg = dict(type=ATTENTION[kind])
        self.layers = nn.ModuleList(
            LayerAttentionResidual(cfg, channels, norm_cfg=dict(type="BN"), first_in_stage=t == 0)
            for t in range(depth)
        )
        randomize_zero_init(self)

    def train(self, mode=True):
        """Keep the statistics frozen."""
        return super().train(False)

    def forward(self, x):
        """Run the layers on one map; its gradient is computed too."""
        x, memory = x.requires_grad_(), ()
        for layer in self.layers:
            x, *memory = layer(x, x, *memory)
        return (x,)


class StageStep(Step):
    """Step of a stage on maps of ResNet-101's third stage."""

    def draw(self, batch, height, width):
        """Draw random maps."""
        return torch.randn(batch, 1024, height // 16, width // 16, device=self.args.device)


def depth(args, depths=(4, 8, 16, 23)):
    """Growth of time and memory with the depth of a stage, and the fitted exponents."""
    rows = []
    for kind in ("light", "base", "mla"):
        found = []
        for count in depths:
            step = StageStep(Stage(kind, count, 1024), args)
            set_path(path := usable_paths(args)[-1])
            title = f"stage of {count} {kind} layers, {path}"
            options = dict(device=args.device, clock=args.clock, title=title)
            found_seconds = measure.time_rounds({path: step}, args.rounds, **options)[path]
            seconds = statistics.median(found_seconds)
            with torch.no_grad(), OperationCounter(step.model) as counter:
                step.model(step.data[:1])
            found.append((count, seconds, max(step.memory(), 1), sum(counter.counts.values())))
        sizes, times, memories, _ = zip(*found, strict=True)
        growth = [f"T^{measure.fit_exponent(sizes, amounts):.2f}" for amounts in (times, memories)]
        for count, seconds, memory, operations in found:
            row = {"model": kind, "path": path, "T": count, "ms": 1e3 * seconds}
            row |= {"MiB": round(memory / 2**20), "G multiply-adds": operations / 1e9}
            rows.append(row | {"time grows as": growth[0], "memory grows as": growth[1]})
    return {"Growth with the depth of a stage": rows}


SUITES = (goals, oom, branch, depth, backbone, compiled, anywhere, detector, comparators)
SUITES = {suite.__name__: suite for suite in SUITES}


def main(argv=None):
    """Run the suites; write the report after each, print it at the end."""
    args = parse_args(argv)
    settings = dict(batch=args.batch_size, size="x".join(map(str, args.size)))
    settings |= dict(rounds=args.rounds, clock=args.clock)
    settings |= dict(precision="autocast" if args.amp else "float32")
    machine, tables = measure.describe_machine(args.device, **settings), {}
    for suite in args.suites:
        tables |= SUITES[suite](args)
        text = measure.write_report(args.out, machine, tables)
    print(text)
    print(f"report.md and report.json are in {args.out}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
