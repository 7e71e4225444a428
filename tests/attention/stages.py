"""The variants under test, and stages of them with random float64 parameters and inputs."""

import torch
import torch.nn.functional as F
from torch import nn

from mrla_mm import attention

from . import reference

VARIANTS = {
    "light": ("MRLALight", {}),
    "light, last output": ("MRLALight", dict(previous="output")),
    "light, no history (b)": ("MRLALight", dict(previous="none")),
    "light, identity value (c)": ("MRLALight", dict(value="identity")),
    "light, linear reduced (d)": ("MRLALight", dict(projection="linear", reduction=4)),
    "light, lambda 1 (e)": ("MRLALight", dict(learnable_lambda=False)),
    "light, ungated": ("MRLALight", dict(gated=False)),
    "light, depthwise alone (g)": ("MRLALight", dict(gated=False, previous="none")),
    "base (a)": ("MRLABase", {}),
    "base, identity value": ("MRLABase", dict(value="identity")),
    "base, linear reduced": ("MRLABase", dict(projection="linear", reduction=2)),
    "MLA (a)": ("MLA", {}),
    "MLA, identity value": ("MLA", dict(value="identity")),
    "MLA, GELU": ("MLA", dict(value="dwconv_gelu")),
    "linear RLA": ("LinearRLA", {}),
    "linear RLA, linear reduced": ("LinearRLA", dict(projection="linear", reduction=2)),
}
EQUATIONS = {
    "MRLALight": reference.light,
    "MRLABase": reference.base,
    "MLA": reference.mla,
    "LinearRLA": reference.linear_rla,
}


def build_blocks(name, depth, channels, head_channels, **options):
    cls, options = getattr(attention, name), dict(options, head_channels=head_channels)
    blocks = nn.ModuleList(cls(channels, first_in_stage=t == 0, **options) for t in range(depth))
    for parameter in blocks.double().parameters():
        nn.init.normal_(parameter, std=0.7)
    return blocks


def run(blocks, xs, shortcuts):
    outputs, memory = [], ()
    for block, x, shortcut in zip(blocks, xs, shortcuts, strict=True):
        out, memory = block(x, shortcut, memory)
        outputs.append(out)
    return outputs


def random_maps(depth, shape):
    means = torch.randn(depth, *shape[:2], 1, 1).double()
    return [(mean + torch.randn(shape)).requires_grad_() for mean in means]


def named(block):
    return {name.removesuffix(".weight"): parameter for name, parameter in block.named_parameters()}


def assert_same(actual, expected, leaves, tolerance=1e-10):
    """Compare lists of tensors and their gradients of named leaves; return the gradients."""
    probes = [torch.randn_like(out) for out in expected]
    options = dict(allow_unused=True, materialize_grads=True)
    results = []
    for outs in (actual, expected):
        grads = torch.autograd.grad(outs, list(leaves.values()), probes, **options)
        results.append(dict(enumerate(outs)) | dict(zip(leaves, grads, strict=True)))
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    return {name: results[0][name] for name in leaves}


class Stage:
    """A stage of one variant and inputs for it; `leaves` are all that a gradient may reach."""

    def __init__(self, variant, *, depth, batch, channels, head_channels, grid):
        torch.manual_seed(0)
        self.name, arguments = VARIANTS[variant]
        self.blocks = build_blocks(self.name, depth, channels, head_channels, **arguments)
        self.xs, self.shortcuts = (random_maps(depth, (batch, channels, *grid)) for _ in range(2))
        self.leaves = {f"x{t}": x for t, x in enumerate(self.xs)}
        self.leaves |= {f"shortcut{t}": shortcut for t, shortcut in enumerate(self.shortcuts)}
        self.leaves |= dict(self.blocks.named_parameters())
        self.options = {key: arguments[key] for key in ("previous", "gated") if key in arguments}
        self.options |= dict(head_channels=head_channels)
        if arguments.get("value") == "dwconv_gelu":
            self.options["gelu"] = F.gelu

    def run(self):
        return run(self.blocks, self.xs, self.shortcuts)

    def run_reference(self):
        parameters = [named(block) for block in self.blocks]
        return EQUATIONS[self.name](self.xs, self.shortcuts, parameters, **self.options)
