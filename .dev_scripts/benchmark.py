#!/usr/bin/env python
"""Measure what layer attention costs: `python .dev_scripts/benchmark.py --models plain light base`.

A model is
  plain, light, base, mla, linear, dwconv   the --host without and with layer attention; dwconv is
                                            light's convolution and norm alone
  CONFIG.py                                 the detector of a config, on random images and boxes
and is measured eager, with --compiled also behind `backbone.compile(dynamic=True)`, with
--efficient-conv-bn-eval also with frozen norms inside the convolutions. A step is forward and
backward; each round times every model's step once, in turn. Columns:
  first, s     the first step, with the compilation
  step, ms     median over the rounds
  time, +-     median of the ratio to the first model's step of the same round, half its
               interquartile range
  MiB, memory  on a GPU the peak of a step beyond what was allocated before, on a CPU the bytes
               saved for backward; the ratio to the first model's
  GPU, ms      on a GPU, the time its kernels take, mean of three steps; GPU: the ratio
  difference   of loss or maps, the largest, from the same model's, eager; nothing wrong is timed
"""

import argparse
import statistics
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import measure
from mrla_mm import cli
from mrla_mm.attention import AttentionResidual
from mrla_mm.config import read_config
from mrla_mm.errors import InputError

ATTENTION = {
    "plain": None,
    "light": dict(type="MRLALight"),
    "base": dict(type="MRLABase"),
    "mla": dict(type="MLA"),
    "linear": dict(type="LinearRLA"),
    "dwconv": dict(type="MRLALight", gated=False, previous="none"),
}
MAPS = (0, 1, 2, 3)
HOSTS = {
    "ResNet": dict(type="mmdet.ResNet", depth=50),
    "ResNeXt": dict(type="mmdet.ResNeXt", depth=50, groups=32, base_width=4),
    "RegNetX": dict(type="mmdet.RegNet", arch="regnetx_3.2gf"),
    "CSPNeXt": dict(type="mmdet.CSPNeXt", deepen_factor=0.33, widen_factor=0.5),
    "Swin": dict(type="mmdet.SwinTransformer", drop_path_rate=0.0),
    "ConvNeXt": dict(type="mmpretrain.ConvNeXt", gap_before_final_norm=False, out_indices=MAPS),
    "DeiT": dict(type="MRLAViT", arch="deit-tiny", img_size=224, out_type="featmap"),
    "PVTv2": dict(type="MRLAPVTv2", arch="b0"),
}
TOLERANCE = {False: 1e-2, True: 0.1}  # of loss and maps, without and with --amp


def parse_args(argv):
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--models", nargs="+", default=["plain", "light", "base"], metavar="MODEL")
    add("--host", default="ResNet", help=f"{', '.join(HOSTS)}, or a config whose backbone to take")
    add("--depth", type=int, help="of a ResNet (default: 50, or a config's)")
    add("--norm", choices=["frozen", "batch"], help="statistics (default: the model's own)")
    add("--backbone-only", action="store_true", help="of configs the ResNet alone, all stages")
    add("--compiled", action="store_true", help="measure each model compiled too")
    add("--efficient-conv-bn-eval", action="store_true", help="each with folded norms too")
    add("--inference", action="store_true", help="the forward pass of backbones in evaluation mode")
    add("--channels-last", action="store_true", help="in the memory layout of that name")
    add("--amp", action="store_true", help="autocast: float16 on a GPU, bfloat16 on a CPU")
    add("--batch-size", type=int, default=4)
    add("--size", type=int, nargs=2, default=[224, 224], help="height and width")
    add("--rounds", type=int, default=7)
    add("--clock", choices=measure.CLOCKS, default="wall", help="cpu: processor seconds")
    add("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    add("--out", type=Path, default=Path("work_dirs/benchmark"), help="for report.md, report.csv")
    args = parser.parse_args(argv)
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return args


def config_of_host(name, host):
    """Return the config of a host, plain or with the layer attention of that name."""
    if name not in ATTENTION:
        raise InputError(f"model {name!r}: give one of {', '.join(ATTENTION)}, or a config file")
    cfg = dict(HOSTS[host] if host in HOSTS else read_config(host, {}).model.backbone)
    cfg.pop("init_cfg", None)
    kind, attention = cfg["type"], ATTENTION[name]
    if kind.startswith("MRLA"):
        cfg["layer_attention"] = attention
    elif attention and kind == "mmdet.ResNet":
        cfg.update(type="MRLAResNet", layer_attention=attention)
    elif attention:
        scoped = kind if "." in kind else f"mmdet.{kind}"
        cfg.update(type="WithLayerAttention", backbone=scoped, layer_attention=attention)
    return cfg


def build(name, args, folded):
    """Return a model, and its backbone: itself unless the model is a detector."""
    init_default_scope("mmdet")
    if name.endswith(".py"):
        model = read_config(name, {}).model
        backbone = model.backbone
        backbone.init_cfg = None
        if args.backbone_only:
            model = backbone
            model.update(out_indices=MAPS, frozen_stages=-1)
            for key in ("out_hidden", "attention_drop_path"):
                model.pop(key, None)
    else:
        model = backbone = config_of_host(name, args.host)
    if args.depth:
        backbone["depth"] = args.depth
    if folded:
        if backbone["type"] in ("ResNet", "mmdet.ResNet"):
            backbone.update(type="MRLAResNet", layer_attention=None)
        backbone["efficient_conv_bn_eval"] = True
    is_detector = model is not backbone
    model = MODELS.build(model)
    for module in model.modules():
        if isinstance(module, AttentionResidual):  # away from the identity that it starts as
            nn.init.uniform_(module.norm.weight, 0.02, 0.05)
    return model, model.backbone if is_detector else model


class Step:
    """The step of a model on fixed random images, which returns the loss; leaves no gradients."""

    def __init__(self, name, args, *, folded=False, compiled=False):
        self.args = args
        model, backbone = build(name, args, folded)
        self.backbone = backbone
        layout = torch.channels_last if args.channels_last else torch.preserve_format
        self.model = model.to(args.device, memory_format=layout)
        self.model.train(not args.inference)  # not chained: mmdet's ResNet returns nothing from it
        for module in backbone.modules():
            if args.norm and isinstance(module, _BatchNorm):
                module.train(args.norm == "batch")
        if compiled:
            backbone.compile(dynamic=True, fullgraph=True)
        self.is_detector = model is not backbone
        if self.is_detector and args.inference:
            raise InputError("--inference measures backbones: add --backbone-only")
        batch, shape = args.batch_size, [3, *args.size]
        if self.is_detector:
            objects = dict(num_items=[10] * batch, num_classes=2, with_mask=True)
            packed = demo_mm_inputs(batch, [shape] * batch, **objects)
            self.data = self.model.data_preprocessor(packed, True)
        else:
            generator = torch.Generator().manual_seed(0)
            self.data = dict(inputs=torch.randn(batch, *shape, generator=generator))
        self.data["inputs"] = self.data["inputs"].to(args.device, memory_format=layout)

    def autocast(self):
        """Return the context of --amp."""
        kind = self.args.device.type
        half = torch.float16 if kind == "cuda" else torch.bfloat16
        return torch.autocast(kind, half, enabled=self.args.amp)

    def maps(self):
        """Return the backbone's maps."""
        with self.autocast(), torch.set_grad_enabled(not self.args.inference):
            return self.backbone(self.data["inputs"])

    def forward(self):
        """Return the loss."""
        torch.manual_seed(0)  # detectors draw the boxes that they learn from
        if not self.is_detector:
            return sum(level.float().square().mean() for level in self.maps())
        with self.autocast():
            return self.model.parse_losses(self.model(**self.data, mode="loss"))[0]

    def __call__(self):
        """Run forward and backward, or the inference alone."""
        loss = self.forward()
        if self.args.inference:
            return loss
        (2**10 * loss).backward()  # in float16 most gradients of a mean would underflow
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def memory(self):
        """Return bytes; None for the inference on a CPU."""
        if self.args.device.type == "cuda":
            return measure.peak_bytes(self, self.args.device)
        return None if self.args.inference else measure.saved_bytes(self.forward, self.model)


def build_steps(name, args):
    """Yield title, step and row of a model's variants; their loss is the eager one's."""
    variants = {"": {}}
    if args.efficient_conv_bn_eval:
        variants[", folded"] = dict(folded=True)
    if args.compiled:
        variants[", compiled"] = dict(compiled=True)
    eager = Step(name, args)
    for variant, options in variants.items():
        title = Path(name).stem + variant
        step = eager
        if options:
            step = Step(name, args, **options)
            step.model.load_state_dict(eager.model.state_dict())
        first = measure.time_once(step, args.device)
        loss, expected = float(step()), float(eager())
        differences = [abs(loss / expected - 1)]
        for ours, wanted in zip(step.maps(), eager.maps(), strict=True):
            differences.append(float((ours - wanted).detach().norm() / wanted.detach().norm()))
        difference = max(differences)
        print(f"{title}: first step {first:.1f} s, loss {loss:.6g}, {difference:.0e}", flush=True)
        if not all(each <= TOLERANCE[args.amp] for each in differences):
            raise InputError(f"{title}: differs from the eager model by {difference:.0e}: wrong")
        yield title, step, {"model": title, "first, s": first, "difference": difference}


def main(argv=None):
    """Build, check and measure the models; write the report and print it."""
    args = parse_args(argv)
    rows, steps = {}, {}
    for name in args.models:
        for title, step, row in build_steps(name, args):
            rows[title], steps[title] = row, step
    seconds = measure.time_rounds(steps, args.rounds, args.device, args.clock)
    base, *_ = rows
    for title, row in rows.items():
        row["step, ms"] = 1e3 * statistics.median(seconds[title])
        row["time"], row["+-"] = measure.ratio(seconds[title], seconds[base])
        if (memory := steps[title].memory()) is not None:
            row["MiB"] = memory / 2**20
            row["memory"] = row["MiB"] / rows[base]["MiB"]
        if args.device.type == "cuda":
            row["GPU, ms"] = 1e3 * measure.busy_seconds(steps[title], args.device)
            row["GPU"] = row["GPU, ms"] / rows[base]["GPU, ms"]
    print(measure.write_report(args.out, vars(args), [*rows.values()]))


if __name__ == "__main__":
    sys.exit(cli.run(main))
