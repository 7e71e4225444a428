"""How much of a residual branch is fused, and why: decided here and nowhere else.

    all        the sum and ReLU before the branch, and the branch
    branch     attention, batch norm, drop path and residual
    attention  the attention alone, before another norm
    nothing    the modules run one after the other, as their classes are written

A variant is fused if its exact class is in the table `FUSED` and its parts are exactly what that
class builds; a subclass may compute anything else, and so may a convolution that was replaced or
changed.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from mmcv.cnn.bricks import DropPath
from torch import Tensor, nn

from mrla_mm.attention.base import Attended, LayerAttention, is_patched
from mrla_mm.attention.light import MRLALight
from mrla_mm.attention.softmax import MLA, MRLABase
from mrla_mm.ops import Weights, base_fused, choose_path, light_fused, mla_fused
from mrla_mm.torch_support import is_autocast_enabled


class Fusion(NamedTuple):
    """How much is fused (see above), by which path of `mrla_mm.ops`, and why.

    `run` is that of the `FusedVariant`, for this attention and path.
    """

    extent: Literal["all", "branch", "attention", "nothing"]
    path: str
    reason: str
    run: Callable[..., Attended] | None = None


class FusedVariant(NamedTuple):
    """A variant's fused path.

    `run(attention, path, c, shortcut, memory, add_relu=False, norm=None)` returns out and the new
    memory, as the attention does. The path is one of `mrla_mm.ops`. c is x itself or, with
    add_relu, the block's output before the sum: x = relu(c + shortcut). With a norm, which stands
    for norm and drop path of the branch, out is x + keep norm(o), else o.
    """

    run: Callable[..., Attended]
    obstacle: Callable[[LayerAttention], str]  # why an instance has no fused path, or ""
    # whether the norm and residual behind an instance can be fused too
    supports_branch: Callable[[LayerAttention], bool] = lambda attention: True


def run_light(
    attention: MRLALight, path, c, shortcut, memory, *, add_relu=False, norm=None
) -> Attended:
    """Run MRLA-light fused."""
    history = attention.choose_history(shortcut, memory)
    weights = Weights(
        query=attention.query.weight if attention.gated else None,
        key=attention.key.weight if attention.gated else None,
        value=None if attention.value is None else attention.value.weight,
        history_scale=attention.history_scale,
    )
    out = light_fused(
        path,
        c,
        shortcut if add_relu else history,
        weights,
        heads=attention.heads,
        has_history=history is not None,
        add_relu=add_relu,
        norm=norm,
    )
    return out, attention.new_memory(out)


def run_base(attention: MRLABase, path, c, shortcut, memory, **options) -> Attended:
    """Run MRLA-base fused."""
    weights = softmax_weights(attention)
    return base_fused(path, c, shortcut, weights, memory, heads=attention.heads, **options)


def run_mla(attention: MLA, path, c, shortcut, memory, **options) -> Attended:
    """Run MLA fused."""
    weights = softmax_weights(attention)
    options["heads"] = attention.heads
    earlier = ()
    if memory:
        averages, *maps = memory
        earlier = (attention.project_keys(averages).flatten(2), *maps)
    out, (average, *maps) = mla_fused(path, c, shortcut, weights, earlier, **options)
    return out, (attention.averages(average, memory), *maps)


def softmax_weights(attention: MRLABase | MLA) -> Weights:
    """The weights of an MRLA-base or MLA."""
    return Weights(attention.query.weight, attention.key.weight, attention.value.weight)


def light_obstacle(attention: MRLALight) -> str:
    """Return why an MRLA-light has no fused path, or an empty string."""
    return "its value has a GELU" if attention.value_gelu else ""


def base_obstacle(attention: MRLABase | MLA) -> str:
    """Return why an MRLA-base or MLA has no fused path, or an empty string."""
    if attention.value is None or attention.value_gelu:
        return "its value is not a convolution alone"
    return ""


FUSED = {
    MRLALight: FusedVariant(
        run_light, light_obstacle, supports_branch=lambda attention: attention.previous != "output"
    ),
    MRLABase: FusedVariant(run_base, base_obstacle),
    MLA: FusedVariant(run_mla, base_obstacle),
}


def choose_fusion(
    branch: nn.Module, x: Tensor, shortcut: Tensor | None = None, relu: nn.Module | None = None
) -> Fusion:
    """Choose how much of a branch is fused.

    Args:
        branch: `AttentionResidual`.
        x: map (B, C, H, W) that enters the attention or, with relu, the sum before it.
        shortcut: the branch's shortcut; where there is a relu, what the sum adds.
        relu: activation between the sum and the attention, to be fused too.

    Raises:
        InputError: the environment variable MRLA_OPS asks for a path that cannot run.
    """
    attention = branch.attention
    variant = FUSED.get(type(attention))
    if variant is None:
        return Fusion("nothing", "naive", f"{type(attention).__name__} has no fused path")
    path, reason = choose_path(x)
    if path == "naive":
        return Fusion("nothing", path, reason)
    obstacle = variant.obstacle(attention) or why_not_as_built(attention)
    obstacle = obstacle or why_not_maps(attention, x, shortcut)
    if obstacle:
        return Fusion("nothing", "naive", obstacle)
    run = partial(variant.run, attention, path)
    if obstacle := why_not_branch(branch, variant, x):
        return Fusion("attention", path, obstacle, run)
    if obstacle := why_not_sum(branch, x, shortcut, relu):
        return Fusion("branch", path, obstacle, run)
    return Fusion("all", path, "nothing stands in the way", run)


def why_not_as_built(attention: LayerAttention) -> str:
    """Return what of an attention is not exactly what its class builds, or an empty string."""
    if is_patched(attention):
        return "the attention has a hook, or a method was replaced"
    query, key, value = (getattr(attention, name, None) for name in ("query", "key", "value"))
    for name, part in dict(query=query, key=key, value=value).items():
        if part is not None and is_patched(part):
            return f"{name} has a hook, or a method was replaced"
    if value is not None and not is_depthwise(value, attention.channels):
        return "value was replaced or changed"
    if query is None and key is None:
        return ""
    if not is_projection(query) or not is_projection(key):
        return "query or key was replaced or changed"
    return "" if query.kernel_size == key.kernel_size else "query and key differ in size"


def is_depthwise(part: nn.Module, channels: int) -> bool:
    """Whether a module is the depthwise 3x3 convolution that the fused paths compute."""
    return (
        type(part) is nn.Conv2d
        and part.kernel_size == (3, 3)
        and part.stride == part.dilation == part.padding == (1, 1)
        and part.padding_mode == "zeros"
        and part.groups == part.in_channels == part.out_channels == channels
        and part.bias is None
        and is_plain(part.weight, channels, 1, 3, 3)
    )


def is_projection(part: nn.Module) -> bool:
    """Whether a module is the query or key convolution that the fused paths compute."""
    return (
        type(part) is nn.Conv1d
        and part.kernel_size[0] % 2 == 1
        and part.padding == (part.kernel_size[0] // 2,)
        and part.stride == part.dilation == (1,)
        and part.groups == 1
        and part.padding_mode == "zeros"
        and part.bias is None
        and is_plain(part.weight, 1, 1, *part.kernel_size)
    )


def is_plain(weight: Tensor, *shape: int) -> bool:
    """Whether a weight has a shape, and is of no class that may compute anything else."""
    return weight.shape == shape and type(weight) in (nn.Parameter, Tensor)


def why_not_maps(attention: LayerAttention, x: Tensor, shortcut: Tensor | None) -> str:
    """Return why plain PyTorch would broadcast or refuse these maps, or an empty string."""
    if shortcut is not None and shortcut.shape != x.shape:
        return "the shortcut has another shape than the map"
    value = attention.value
    dtype = x.dtype if value is None else value.weight.dtype
    if dtype == x.dtype or is_autocast_enabled(x.device.type):
        return ""
    return f"the value's weight is in {dtype}, the map in {x.dtype}"


def why_not_branch(branch: nn.Module, variant: FusedVariant, x: Tensor) -> str:
    """Return why norm, drop path and residual cannot be fused too, or an empty string."""
    norm = branch.norm
    if type(norm) is not nn.BatchNorm2d or not norm.track_running_stats:  # as over tokens
        return "the norm is not a BatchNorm2d with running statistics"
    if branch.overrides("attend", "activate"):
        return "the branch has methods of its own"
    mean = norm.running_mean
    if norm.momentum is None or mean is None or norm.num_batches_tracked is None:
        return "the norm has no moving average"
    channels = x.shape[1:2]
    tensors = mean, norm.running_var, norm.weight, norm.bias
    if any([tensor is not None and tensor.shape != channels for tensor in tensors]):
        return "the norm is for another number of channels"
    if (mean.dtype == torch.float64) != (x.dtype == torch.float64):
        return "the norm is in another precision than the map"
    if norm.training and x[:, 0].numel() == 1:
        return "one element a channel has no batch statistics"
    if branch.activation is not None:
        return "an activation follows the norm"
    if not variant.supports_branch(branch.attention):
        return "the attention's output is needed as its memory"
    drop_path = branch.drop_path
    if type(drop_path) not in (DropPath, nn.Identity):
        return "drop path was replaced by another module"
    if is_patched(norm) or is_patched(drop_path):
        return "norm or drop path has a hook, or a method was replaced"
    return ""


def why_not_sum(
    branch: nn.Module, x: Tensor, shortcut: Tensor | None, relu: nn.Module | None
) -> str:
    """Return why the sum and ReLU before a branch cannot be fused too, or an empty string."""
    if branch.norm.training:
        return "the norm has the statistics of the batch"
    if relu is None:
        return "no sum and ReLU come before it"
    is_replaced = is_patched(branch) or branch.overrides("forward")
    if type(relu) is not nn.ReLU or is_patched(relu) or is_replaced:
        return "the ReLU or the branch was changed or hooked"
    if x.dtype != shortcut.dtype:
        return "the sum is of two dtypes"
    return ""
