#!/usr/bin/env python
"""Count how the multiply-adds of layer attention grow: `python .dev_scripts/growth.py` (nothing is timed).

With the resolution: what MRLA-light adds to CeiT-T, linear in the number of pixels (the paper's complexity figure).
With the depth of a stage: MLA and base quadratically, light linearly, in a stage of T layers on maps of 1024 x 14 x 14.
"""

import sys

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from measure import as_markdown
from mrla_mm import cli
from mrla_mm.analysis import complexity
from mrla_mm.attention import LayerAttentionResidual
from mrla_mm.config import read_config

SIDES = (224, 256, 288, 320, 384, 448, 512, 640)
DEPTHS = (1, 2, 4, 6, 8, 12, 16, 23, 36)
VARIANTS = {"MLA": "MLA", "base": "MRLABase", "light": "MRLALight"}


class Stage(nn.Module):
    """Layer attention alone on maps (B, 1024, H / 16, W / 16): each layer's output is the next one's input."""

    def __init__(self, variant, depth):
        super().__init__()
        cfg, norm = dict(type=variant), dict(type="BN")
        self.layers = nn.ModuleList(
            LayerAttentionResidual(cfg, 1024, norm_cfg=norm, first_in_stage=not t) for t in range(depth)
        )

    def forward(self, image):
        """Run the layers on maps of zeros."""
        x, memory = image.new_zeros(len(image), 1024, *(side // 16 for side in image.shape[2:])), None
        for layer in self.layers:
            x, memory = layer(x, x, memory)
        return x


def build(name):
    """Build the classifier of a packed config, without weights."""
    init_default_scope("mmpretrain")
    return MODELS.build(read_config(f"mrla_mm::imagenet/{name}.py", {}).model)


def main(argv=None):
    """Print both tables."""
    plain, light = build("ceit_tiny_8xb128"), build("ceit_tiny_mrla_light_8xb128")
    rows = []
    for side in SIDES:
        totals = [complexity.measure(model, (side, side)).total for model in (plain, light)]
        added = totals[1] - totals[0]
        rows.append({"image": f"{side} x {side}", "added [M]": added / 1e6, "per pixel": added / side**2})
    print(f"What MRLA-light adds to CeiT-T:\n\n{as_markdown(rows)}\n")
    rows = []
    for depth in DEPTHS:
        counted = {name: complexity.measure(Stage(kind, depth), (224, 224)).total for name, kind in VARIANTS.items()}
        rows.append({"layers": depth} | {f"{name} [G]": total / 1e9 for name, total in counted.items()})
    print(f"Layer attention by the depth of its stage:\n\n{as_markdown(rows)}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
