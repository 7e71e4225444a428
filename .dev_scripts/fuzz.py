"""Random backbones on random images, by hand: `python .dev_scripts/fuzz.py --minutes 5`, `--seed 17` for one of them.

What is built must compute the same by default as the equations in plain PyTorch (MRLA_OPS=naive), gradients too. A
combination that is refused is printed with its error, which should say what is wrong with it.
"""

import argparse
import os
import random
import time

import torch

from mrla_mm import backbones

EITHER = [True, False]
VARIANTS = ("MRLALight", "MRLABase", "MLA", "LinearRLA")
NORMS = [dict(type="BN"), dict(type="BN", requires_grad=False), dict(type="GN", num_groups=2)]
VIT = dict(arch=[dict(embed_dims=16, num_layers=4, num_heads=2, feedforward_channels=16)], img_size=[(64, 32), 64])
CHOICES = {
    "MRLAResNet": dict(depth=[18, 50], base_channels=[4, 8], norm_cfg=NORMS, norm_eval=EITHER, frozen_stages=[-1, 1])
    | dict(with_cp=EITHER, dilations=[(1, 1, 1, 1), (1, 1, 2, 4)], strides=[(1, 2, 2, 2), (1, 2, 1, 1)]),
    "MRLAViT": VIT | dict(stage_blocks=[1, 2, 4], with_cls_token=EITHER, out_type=["featmap"]),
    "MRLACeiT": VIT | dict(stem_channels=[8, 16], norm_eval=EITHER, out_type=["featmap"]),
    "MRLAPVTv2": dict(embed_dims=[8, 16], num_layers=[(1, 1, 1, 1), (2, 1, 1, 1)], frozen_stages=[0, 1]),
    "MRLAEfficientNet": dict(out_indices=[(2,), (2, 3)], norm_eval=EITHER, with_cp=EITHER, norm_cfg=NORMS),
}


def outputs_and_gradients(model, image, path):
    """Return what a model computes by a path of `mrla_mm.ops`; without a name, by the one that it chooses itself."""
    os.environ["MRLA_OPS"] = path
    model.zero_grad()
    torch.manual_seed(0)  # drop path
    outs = model(image)
    sum(out.square().mean() for out in outs).backward()
    return [*outs, *(p.grad for p in model.parameters() if p.grad is not None)]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--minutes", type=float, default=5)
parser.add_argument("--seed", type=int)
args = parser.parse_args()
end, agreed = time.time() + 60 * args.minutes, 0
while time.time() < end and not (agreed and args.seed is not None):
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    name = (rng := random.Random(seed)).choice(list(CHOICES))
    drawn = {key: rng.choice(values) for key, values in CHOICES[name].items()}
    drawn["layer_attention"] = dict(type=rng.choice(VARIANTS), head_channels=rng.choice([1, 2, 4, 8]))
    try:
        model = getattr(backbones, name)(**drawn, zero_init_attention=False).double().train(rng.random() < 0.5)
        image = torch.rand(2, 3, rng.randrange(32, 80), rng.randrange(32, 80), dtype=torch.float64)
        pairs = zip(*(outputs_and_gradients(model, image, path) for path in ("", "naive")), strict=True)
        worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)
    except Exception as error:
        print(f"{seed} {name} {drawn}: {type(error).__name__}: {error}"[:400])
        continue
    assert worst < 1e-6, f"seed {seed}: {name} {drawn} on {tuple(image.shape)} differs by {worst:.1e}"
    agreed += 1
print(f"{agreed} combinations agree")
