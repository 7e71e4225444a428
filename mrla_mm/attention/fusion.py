"""How much of a residual branch is fused, and why: decided here and nowhere else.

    all        the sum and ReLU before the branch, and the branch
    branch     attention, norm with frozen statistics, drop path and residual
    attention  the attention alone: batch statistics, or another norm
    nothing    the modules run one after the other, as their classes are written

A variant is fused if its exact class is in the table `FUSED`; a subclass may compute anything else.
"""

from collections.abc import Callable
from typing import NamedTuple

from mmcv.cnn.bricks import DropPath
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from mrla_mm.attention.base import LayerAttention, Memory
from mrla_mm.attention.light import MRLALight
from mrla_mm.attention.softmax import MRLABase, SoftmaxMemory
from mrla_mm.ops import Weights, base_fused, choose_path, light_fused


class Fusion(NamedTuple):
    """How much is fused (one of the words above), by which path of `mrla_mm.ops`, and the reason."""

    extent: str
    path: str
    reason: str


class FusedVariant(NamedTuple):
    """A variant's fused path.

    Attributes:
        run: called with (attention, path, c, shortcut, memory, add_relu=, norm=), returns out and
            the new memory; see `mrla_mm.ops.light` for what each means.
        obstacle: returns why an instance has no fused path, or an empty string.
        supports_branch: whether the norm and residual behind an instance can be fused too.
    """

    run: Callable[..., tuple[Tensor, Memory]]
    obstacle: Callable[[LayerAttention], str]
    supports_branch: Callable[[LayerAttention], bool] = lambda attention: True


def run_light(
    attention: MRLALight, path: str, c: Tensor, shortcut: Tensor, memory: Memory, **branch
) -> tuple:
    """Run MRLA-light fused; the arguments are those of `FusedVariant.run`."""
    query, key = (attention.query.weight, attention.key.weight) if attention.gated else (None, None)
    value = None if attention.value is None else attention.value.weight
    history = attention.history(shortcut, memory)
    out = light_fused(
        path,
        c,
        shortcut if branch["add_relu"] else history,
        Weights(query, key, value, attention.history_scale),
        heads=attention.heads,
        has_history=history is not None,
        **branch,
    )
    return out, attention.memory(out)


def run_base(
    attention: MRLABase, path: str, c: Tensor, shortcut: Tensor, memory: Memory, **branch
) -> tuple:
    """Run MRLA-base fused; the arguments are those of `FusedVariant.run`."""
    earlier = memory or SoftmaxMemory()
    weights = Weights(attention.query.weight, attention.key.weight, attention.value.weight)
    out, *memory = base_fused(path, c, shortcut, weights, earlier, heads=attention.heads, **branch)
    return out, SoftmaxMemory(*memory)


def light_obstacle(attention: MRLALight) -> str:
    """Return why an MRLA-light has no fused path, or an empty string."""
    return "its value has a GELU" if attention.value_gelu else ""


def base_obstacle(attention: MRLABase) -> str:
    """Return why an MRLA-base has no fused path, or an empty string."""
    return (
        "its value is not a convolution alone"
        if attention.value is None or attention.value_gelu
        else ""
    )


def light_supports_branch(attention: MRLALight) -> bool:
    """Whether norm and residual can be fused too: not where the output itself becomes the memory."""
    return attention.previous != "output"


PARTS = (nn.Conv1d, nn.Conv2d, nn.Linear)  # whose weights the fused paths read
FUSED = {
    MRLALight: FusedVariant(run_light, light_obstacle, light_supports_branch),
    MRLABase: FusedVariant(run_base, base_obstacle),
}


def choose_fusion(
    branch: nn.Module, x: Tensor, *, shortcut: Tensor | None = None, relu: nn.Module | None = None
) -> Fusion:
    """Choose how much of a branch is fused.

    Args:
        branch: module with `attention`, `norm` and `drop_path`.
        x: map (B, C, H, W) that enters the attention or, with relu, the sum before it.
        shortcut: what the sum adds, where there is a relu.
        relu: activation between the sum and the attention, to be fused too.

    Raises:
        InputError: the environment variable MRLA_OPS asks for a path that cannot run.
    """
    attention, variant = branch.attention, FUSED.get(type(branch.attention))
    if variant is None:
        return Fusion("nothing", "naive", f"{type(attention).__name__} has no fused path")
    if obstacle := variant.obstacle(attention):
        return Fusion("nothing", "naive", obstacle)
    for part in (attention, *attention.children()):
        if type(part) not in PARTS and part is not attention:
            return Fusion("nothing", "naive", "a projection was replaced by another module")
        if has_hooks(part):
            return Fusion(
                "nothing", "naive", "the attention has a hook, or its forward was replaced"
            )
    path, reason = choose_path(x)
    if path == "naive":
        return Fusion("nothing", path, reason)
    if not is_frozen_bn(branch.norm):
        return Fusion("attention", path, "the norm is not a BatchNorm2d with frozen statistics")
    if not variant.supports_branch(attention):
        return Fusion("attention", path, "the attention's output is needed as its memory")
    if type(branch.drop_path) not in (DropPath, nn.Identity):
        return Fusion("attention", path, "drop path was replaced by another module")
    if has_hooks(branch.norm) or has_hooks(branch.drop_path):
        return Fusion(
            "attention", path, "norm or drop path has a hook, or its forward was replaced"
        )
    if relu is None:
        return Fusion("branch", path, "no sum and ReLU come before it")
    if type(relu) is not nn.ReLU or has_hooks(relu) or has_hooks(branch):
        return Fusion(
            "branch", path, "the activation is not a ReLU, or it or the branch has a hook"
        )
    if x.dtype != shortcut.dtype:
        return Fusion("branch", path, "the sum is of two dtypes")
    return Fusion("all", path, "nothing stands in the way")


def is_frozen_bn(norm: nn.Module) -> bool:
    """Whether a norm is a batch norm that uses its running statistics, a fixed affine function of each channel."""
    return type(norm) is nn.BatchNorm2d and not norm.training and norm.running_mean is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, of its own or of all modules (profilers), or a replaced forward."""
    own, shared = module.__dict__, nn_module
    before = (
        own["_forward_pre_hooks"] or own["_backward_pre_hooks"] or shared._global_forward_pre_hooks
    )
    after = own["_forward_hooks"] or own["_backward_hooks"] or shared._global_forward_hooks
    backward = shared._global_backward_pre_hooks or shared._global_backward_hooks
    return bool(before or after or backward or "forward" in own)
