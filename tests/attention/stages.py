"""The variants under test, and stages of them with random float64 parameters and inputs."""

from dataclasses import dataclass

import torch

from mrla_mm import attention

from . import reference

VARIANTS = {
    "light": ("MRLALight", {}),
    "light, last output": ("MRLALight", {"previous": "output"}),
    "light, no history (b)": ("MRLALight", {"previous": "none"}),
    "light, identity value (c)": ("MRLALight", {"value": "identity"}),
    "light, linear (d)": ("MRLALight", {"projection": "linear"}),
    "light, linear reduced": ("MRLALight", {"projection": "linear", "reduction": 4}),
    "light, lambda 1 (e)": ("MRLALight", {"learnable_lambda": False}),
    "light, last output, lambda 1": (
        "MRLALight",
        {"previous": "output", "learnable_lambda": False},
    ),
    "light, ungated": ("MRLALight", {"gated": False}),
    "light, depthwise alone (g)": ("MRLALight", {"gated": False, "previous": "none"}),
    "light, kernel 7": ("MRLALight", {"kernel_size": 7}),
    "base (a)": ("MRLABase", {}),
    "base, identity value": ("MRLABase", {"value": "identity"}),
    "base, linear reduced": ("MRLABase", {"projection": "linear", "reduction": 2}),
    "base, kernel 1": ("MRLABase", {"kernel_size": 1}),
    "MLA (a)": ("MLA", {}),
    "MLA, identity value": ("MLA", {"value": "identity"}),
    "MLA, linear reduced": ("MLA", {"projection": "linear", "reduction": 2}),
    "linear RLA": ("LinearRLA", {}),
    "linear RLA, identity value": ("LinearRLA", {"value": "identity"}),
    "linear RLA, linear reduced": ("LinearRLA", {"projection": "linear", "reduction": 2}),
}
SOFTMAX_AND_KERNEL = ("MRLABase", "MLA", "LinearRLA")
CLASSES = ("MRLALight", *SOFTMAX_AND_KERNEL)


def build_blocks(name, depth, channels, head_channels, **arguments):
    """One module per block of a stage, float64, every parameter drawn anew."""
    cls = getattr(attention, name)
    blocks = [
        cls(channels, head_channels=head_channels, first_in_stage=t == 0, **arguments).to(
            torch.float64
        )
        for t in range(depth)
    ]
    for block in blocks:
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
    return blocks


def run(blocks, xs, shortcuts):
    """The stage loop of a backbone."""
    outputs, memory = [], ()
    for block, x, shortcut in zip(blocks, xs, shortcuts, strict=True):
        out, memory = block(x, shortcut, memory)
        outputs.append(out)
    return outputs


def random_maps(depth, shape):
    """Maps whose channels have random means, so that pooled scores do not vanish."""
    return [
        (torch.randn(shape[:2]).double()[..., None, None] + torch.randn(shape).double())
        for _ in range(depth)
    ]


def named(block):
    """The parameters under the names of the reference."""
    return {name.removesuffix(".weight"): parameter for name, parameter in block.named_parameters()}


def assert_same(actual, expected, leaves, tolerance=1e-10):
    """Compare outputs and gradients of named leaves; return the expected gradients."""
    cotangents, found = [torch.randn_like(out) for out in actual], []
    for outs in (actual, expected):
        grads = torch.autograd.grad(outs, list(leaves.values()), cotangents, allow_unused=True)
        grads = [
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(leaves.values(), grads, strict=True)
        ]
        found.append([*outs, *grads])
    for name, *pair in zip(
        [*(f"output {t}" for t in range(len(actual))), *leaves], *found, strict=True
    ):
        torch.testing.assert_close(
            *pair, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    return dict(zip(leaves, grads, strict=True))


@dataclass
class Stage:
    """A stage of one variant and inputs for it."""

    name: str
    arguments: dict
    head_channels: int
    blocks: list
    xs: list
    shortcuts: list

    @classmethod
    def draw(cls, variant, *, depth, batch, channels, head_channels, grid, seed=0):
        torch.manual_seed(seed)
        name, arguments = VARIANTS[variant]
        blocks = build_blocks(name, depth, channels, head_channels, **arguments)
        xs, shortcuts = (random_maps(depth, (batch, channels, *grid)) for _ in range(2))
        for tensor in (*xs, *shortcuts):
            tensor.requires_grad_()
        return cls(name, arguments, head_channels, blocks, xs, shortcuts)

    def leaves(self):
        """Every tensor that a gradient may reach, by name."""
        found = {f"x{t}": x for t, x in enumerate(self.xs)}
        found |= {f"shortcut{t}": shortcut for t, shortcut in enumerate(self.shortcuts)}
        for t, block in enumerate(self.blocks):
            found |= {f"block{t}.{name}": parameter for name, parameter in block.named_parameters()}
        return found

    def run(self):
        return run(self.blocks, self.xs, self.shortcuts)

    def run_reference(self):
        parameters = [named(block) for block in self.blocks]
        if self.name == "MRLALight":
            options = {
                key: self.arguments[key] for key in ("previous", "gated") if key in self.arguments
            }
            return reference.light(
                self.xs, self.shortcuts, parameters, head_channels=self.head_channels, **options
            )
        equations = {
            "MRLABase": reference.base,
            "MLA": reference.mla,
            "LinearRLA": reference.linear_rla,
        }
        return equations[self.name](self.xs, parameters, head_channels=self.head_channels)
