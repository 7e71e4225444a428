#!/usr/bin/env python
"""Compare the gradients of DistributedDataParallel with those of one process.

`python .dev_scripts/check_distributed.py --processes 4` splits a global batch over processes. Small
backbones of every family and variant run on the CPU with gloo: frozen stages, activation
checkpointing, a static graph, no_sync, and batch statistics reduced over the processes.
`find_unused_parameters` is off. An error above TOLERANCE exits with 1.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODELS
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

import mrla_mm  # noqa: F401
from mrla_mm import cli

TOLERANCE = 1e-5  # relative to a parameter's largest gradient
NEGLIGIBLE = 1e-7  # relative to the model's largest gradient: smaller ones count as zero
VARIANTS = ("MRLALight", "MRLABase", "MLA", "LinearRLA")
IMAGES = 2  # per process
SIZE = (49, 33)
RESNET = dict(type="MRLAResNet", depth=18, base_channels=16, strides=(1, 2, 2, 1), norm_eval=True)
TINY = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=64)
VIT = dict(type="MRLAViT", arch=TINY, img_size=SIZE, stage_blocks=2)
VIT |= dict(out_type="featmap", out_indices=[1, 3])
CEIT = dict(type="MRLACeiT", arch=TINY | dict(num_layers=2), img_size=(64, 48), stem_channels=16)
OTHERS = (
    CEIT | dict(out_type="featmap"),
    dict(type="MRLAPVTv2", drop_path_rate=0.0),
    dict(type="MRLAEfficientNet", arch="b0", drop_path_rate=0.0),
)


@MODELS.register_module()
class AllReduceBatchNorm(_BatchNorm):
    """SyncBatchNorm for the CPU, where torch refuses its own: statistics of the global batch."""

    def _check_input_dim(self, x):
        pass

    def forward(self, x):
        """Normalize (B, C, H, W)."""
        if not self.training:
            return super().forward(x)
        moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        moments = all_reduce(moments) / dist.get_world_size()
        mean, variance = moments[0], moments[1] - moments[0].square()
        x = (x - mean[:, None, None]) * torch.rsqrt(variance + self.eps)[:, None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def cases(short: bool) -> Iterator[dict]:
    """Yield what is compared: a name, the backbone's config, and how it is wrapped."""
    checkpointing = dict(with_cp=True, static_graph=True)
    for variant in VARIANTS:
        attention = dict(layer_attention=dict(type=variant, head_channels=16))
        yield dict(name=f"ResNet {variant}", **attention)
        yield dict(name=f"ResNet {variant}, checkpointing", with_cp=True, **attention)
        yield dict(name=f"ResNet {variant}, no_sync", no_sync=True, **attention)
        yield dict(name=f"ResNet {variant}, batch statistics", sync=True, **attention)
        if short:
            continue
        yield dict(name=f"ResNet {variant}, static graph", **checkpointing, **attention)
        name = f"ResNet {variant}, batch statistics, checkpointing"
        yield dict(name=name, sync=True, with_cp=True, **attention)
    for stages in range(5):
        for variant in VARIANTS[:1] if short else VARIANTS:
            attention = dict(layer_attention=dict(type=variant, head_channels=16))
            name = f"ResNet {variant}, {stages} frozen stages"
            yield dict(name=name, frozen_stages=stages, **attention)
    yield dict(name="ResNet-50 MRLALight, static graph", depth=50, **checkpointing)
    for variant in VARIANTS[:2] if short else VARIANTS:
        model = dict(VIT, layer_attention=dict(type=variant, head_channels=16))
        yield dict(name=f"ViT {variant}", model=model)
        name = f"ViT {variant}, checkpointing, 1 frozen stage"
        yield dict(name=name, model=model, with_cp=True, frozen_stages=1)
    for model in () if short else OTHERS:
        name = model["type"].removeprefix("MRLA")
        yield dict(name=name, model=model)
        yield dict(name=f"{name}, static graph", model=model, **checkpointing)


class Detector(nn.Module):
    """A backbone with a scale behind it, which trains even if the whole backbone is frozen."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images):
        """Return the levels (B, C, H, W)."""
        return [self.scale * level for level in self.backbone(images)]


def build(case: dict, *, distributed: bool) -> nn.Module:
    """Build a case's model, its branches not starting as identities.

    Batch statistics make some gradients zero and others small differences of large numbers: those
    cases use float64.
    """
    torch.manual_seed(0)
    keys = ("depth", "layer_attention", "with_cp", "frozen_stages")
    settings = {key: case[key] for key in keys if key in case}
    model = dict(case.get("model", RESNET), zero_init_attention=False, **settings)
    sync = "sync" in case
    if sync:
        norm = "AllReduceBatchNorm" if distributed else "BN"
        model |= dict(norm_eval=False, norm_cfg=dict(type=norm))
    backbone = MODELS.build(model).train()
    for module in backbone.modules():
        if isinstance(module, _BatchNorm) and not sync:
            module.eval()
    return Detector(backbone).double() if sync else Detector(backbone)


def gradients(
    model: nn.Module, images: torch.Tensor, no_sync: bool
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the second of two steps, which is where unused parameters would fail.

    With no_sync those of both, which processes exchange after the second alone.
    """
    images = images.to(next(model.parameters()).dtype)
    for quiet in (no_sync, False):
        if quiet or not no_sync:
            model.zero_grad()
        with model.no_sync() if quiet and hasattr(model, "no_sync") else nullcontext():
            levels = model(images)
            # Channels are weighted, or a norm at the end would make the loss constant.
            losses = []
            for y in levels:
                scale = torch.linspace(0.5, 1.5, y.shape[1])
                losses.append((y.square().mean((0, 2, 3)) * scale).mean())
            sum(losses).backward()
    model = getattr(model, "module", model)
    return {name: value.grad for name, value in model.named_parameters() if value.requires_grad}


def compare(case: dict, rank: int, world: int) -> dict:
    """Run a case in every process; return its row."""
    torch.manual_seed(1)
    images = torch.randn(world * IMAGES, 3, *SIZE)
    options = dict(broadcast_buffers=False, static_graph=case.get("static_graph", False))
    model = MMDistributedDataParallel(build(case, distributed=True), **options)
    shared = gradients(model, images[rank * IMAGES : (rank + 1) * IMAGES], "no_sync" in case)
    row = dict(case=case["name"])
    if rank:
        return row
    alone = gradients(build(case, distributed=False), images, "no_sync" in case)
    row["without gradient"] = [name for name, value in shared.items() if value is None]
    if not row["without gradient"]:
        floor = NEGLIGIBLE * max(value.abs().max() for value in alone.values())
        scales = {name: value.abs().max().clamp(min=floor) for name, value in alone.items()}
        errors = {}
        for name, value in shared.items():
            errors[name] = float((value - alone[name]).abs().max() / scales[name])
        row["worst"] = max(errors, key=errors.get)
        row["error"] = errors[row["worst"]]
    row["passed"] = shared.keys() == alone.keys() and row.get("error", 1) <= TOLERANCE
    return row


def work(rank: int, world: int, port: int, short: bool) -> None:
    """Run all cases as one of the processes; the first one reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    rows = []
    for case in cases(short):
        rows.append(compare(case, rank, world))
        if rank == 0:
            print(f"{case['name']:60} {rows[-1].get('error', float('nan')):.1e}", flush=True)
            if unused := rows[-1]["without gradient"]:
                print("    without gradient:", *unused, flush=True)
    if rank == 0:
        worst = max(row.get("error", float("inf")) for row in rows)
        passed = sum(row["passed"] for row in rows)
        print(f"{passed} of {len(rows)} passed, {world} processes, largest error {worst:.1e}")
    dist.barrier()
    dist.destroy_process_group()
    if not all(row.get("passed", True) for row in rows):
        sys.exit(1)


def main(argv: list[str] | None = None) -> None:
    """Fork the processes, so that they need not import anything, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--short", action="store_true", help="fewer combinations")
    args = parser.parse_args(argv)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (args.processes, port, args.short)
    torch.multiprocessing.start_processes(work, arguments, args.processes, start_method="fork")


if __name__ == "__main__":
    sys.exit(cli.run(main))
