"""What every layer-attention variant shares: its projections, its heads and its contract."""

import math
import re
from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from mrla_mm import functional
from mrla_mm.errors import InputError

AttentionConfig = Mapping | str | type | Literal[False] | None  # `layer_attention` of a backbone
Memory = tuple[Tensor, ...]  # what the earlier layers of a stage left, empty at its first layer
Attended = tuple[Tensor, Memory]  # what a layer attention returns: out, and the memory it leaves
REPLACEABLE = ("forward", "_conv_forward", "project_value")  # methods that cheaper forms stand for


def attention_config(layer_attention: AttentionConfig) -> dict | None:
    """Return a variant's config, given it or its name or class alone; None for None or False."""
    if layer_attention is None or layer_attention is False:
        return None
    is_name = isinstance(layer_attention, str | type)
    config = dict(type=layer_attention) if is_name else layer_attention
    if not isinstance(config, Mapping) or not config.get("type"):
        remedy = "must be a name or config such as dict(type='MRLALight'), or None for no attention"
        raise InputError(f"layer_attention={layer_attention!r} {remedy}")
    return dict(config)


def stage_pattern(stages: str) -> re.Pattern:
    """Return the pattern of the stages that get layer attention; InputError if it is none."""
    try:
        return re.compile(stages)
    except (TypeError, re.error) as error:
        expected = "must be a regular expression such as 'layer[34]'"
        raise InputError(f"stages={stages!r} {expected}: {error}") from None


def eca_kernel_size(channels: int) -> int:
    """Kernel size of the query and key convolutions by the rule of ECA-Net: 5 at 256 channels."""
    size = int(abs(math.log2(channels) + 1) / 2)
    return size if size % 2 else size + 1


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InputError unless an argument is one of its choices."""
    if value not in choices:
        raise InputError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


class LayerAttention(nn.Module):
    """One layer's attention over the earlier layers of its stage.

    The contract is ``out, memory = attention(x, shortcut, memory)``. The memory is what the earlier
    layers of the stage left, a flat tuple of tensors that is empty at the first one; it is passed
    along and never stored on the module. x, out and the shortcut are maps (B, C, H, W); the
    shortcut is None where a block has none of that shape.

    Args:
        channels: C of the feature maps.
        head_channels: D, consecutive channels that share one attention weight; Table 4 (f). By
            default 32, or the largest number below it that divides C.
        value: "dwconv" for a depthwise 3x3 convolution, "dwconv_gelu" for its GELU (Algorithm 4),
            "identity" for the feature map itself, Table 4 (c).
        projection: "conv1d" for a convolution along the channels, of `eca_kernel_size`; "linear"
            for full linear layers, Table 4 (d).
        reduction: the linear layers project C to C // reduction channels; 16 gives the paper's
            28.2 M parameters.
        first_in_stage: this layer starts a stage, so it never has a history. Set by the stage.

    Attributes:
        uses_shortcut: whether the shortcut is used; on tokens it is None otherwise.
        has_memory: whether it leaves a memory, which what calls the blocks must pass on.
        activation: class of the activation between the branch's norm and its drop path, or None.
    """

    token_defaults = dict(head_channels=16)  # of arguments, in `TokenAttentionResidual`
    default_head_channels = 32
    uses_shortcut = False
    has_memory = True
    activation: type[nn.Module] | None = None

    def __init__(
        self,
        channels: int,
        head_channels: int | None = None,
        *,
        value: str = "dwconv",
        projection: str = "conv1d",
        reduction: int = 1,
        first_in_stage: bool = False,
    ) -> None:
        super().__init__()
        check_choice("value", value, ("dwconv", "dwconv_gelu", "identity"))
        check_choice("projection", projection, ("conv1d", "linear"))
        if head_channels is None:
            sizes = range(self.default_head_channels, 0, -1)
            head_channels = next(size for size in sizes if channels % size == 0)
        if type(head_channels) is not int or head_channels < 1 or channels % head_channels:
            raise InputError(f"head_channels={head_channels!r} must divide channels={channels}")
        self.channels = channels
        self.heads = channels // head_channels
        self.first_in_stage = first_in_stage
        self.query = make_projection(channels, projection, reduction)
        self.key = make_projection(channels, projection, reduction)
        self.value = None
        if value != "identity":
            self.value = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.value_gelu = value == "dwconv_gelu"

    def project_query(self, pooled: Tensor) -> Tensor:
        """Query of pooled features, f_Q: (B, C) -> (B, G, D)."""
        return functional.split_heads(run_projection(self.query, pooled), self.heads)

    def project_key(self, pooled: Tensor) -> Tensor:
        """Key of pooled features, f_K: (B, C) -> (B, G, D)."""
        return functional.split_heads(run_projection(self.key, pooled), self.heads)

    def add_to(
        self, x: Tensor, shortcut: Tensor | None, memory: Memory, scale: Tensor, offset: Tensor
    ) -> Attended:
        """Return x + scale out + offset, and the new memory: a branch whose norm is frozen.

        This one calls the attention. A variant overrides it where it can do with fewer maps. It is
        not called where a subclass's forward, a hook or a replaced method would be passed over.

        Shapes:
            x and shortcut (B, C, H, W); scale and offset (B, C) -> y (B, C, H, W).
        """
        out, memory = self(x, shortcut, memory)
        return x + functional.scale_map(out, scale, offset), memory

    def remove_shortcut(self) -> None:
        """Disable the shortcut, for a block whose input and output differ in shape."""
        self.uses_shortcut = False

    def query_and_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key of a feature map: (B, C, H, W) -> two (B, G, D)."""
        pooled = functional.global_average(x)
        return self.project_query(pooled), self.project_key(pooled)

    def project_value(self, x: Tensor) -> Tensor:
        """Value of a feature map, f_V: (B, C, H, W) -> (B, C, H, W)."""
        value = x if self.value is None else self.value(x)
        return F.gelu(value) if self.value_gelu else value

    def value_is_plain(self) -> bool:
        """Whether `project_value` is what this class writes, without a GELU."""
        overridden = type(self).project_value is not LayerAttention.project_value
        return not (overridden or is_patched(self) or self.value_gelu)

    def value_is_depthwise(self) -> bool:
        """Whether `project_value` is the convolution that this class builds, and nothing else."""
        return self.value_is_plain() and is_depthwise(self.value, self.channels)

    def scaled_value(
        self, x: Tensor, gain: Tensor, offset: Tensor | None = None, *, residual: bool = False
    ) -> Tensor:
        """Return gain f_V(x) + offset, with residual x + gain f_V(x) + offset.

        Shapes: x (B, C, H, W), gain and offset (B, C) -> (B, C, H, W).
        """
        if self.value_is_depthwise():
            weight = self.value.weight
            return functional.scaled_value(x, weight, gain, offset, residual=residual)
        out = functional.scale_map(self.project_value(x), gain, offset)
        return x + out if residual else out

    def recorded_arguments(self) -> dict[str, object]:
        """Return the arguments that change the result but no name or shape of a weight.

        State dicts carry them in torch's metadata, so that weights trained with other arguments
        raise an error on loading. A subclass adds its own: plain strings and numbers. The type is
        that of this package: a subclass may have any name and loads its parent's weights.
        """
        ours = (each for each in type(self).__mro__ if each.__module__.startswith("mrla_mm."))
        return dict(
            type=next(ours).__name__,
            head_channels=self.channels // self.heads,
            value_gelu=self.value_gelu,
            first_in_stage=self.first_in_stage,
        )

    def changed_arguments(self, metadata: dict) -> str:
        """Return in words how a state dict's metadata differs from `recorded_arguments`."""
        trained = metadata.get("layer_attention", {})
        if not isinstance(trained, dict):
            return f"its record of layer_attention is {trained!r}, not a dict of arguments"
        return ", ".join(
            f"trained with {key}={trained[key]!r}, the model has {own!r}"
            for key, own in self.recorded_arguments().items()
            if trained.get(key, own) != own
        )

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).setdefault(prefix[:-1], {})
        metadata["layer_attention"] = self.recorded_arguments()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if changed := self.changed_arguments(local_metadata):
            error_msgs = args[-1]
            error_msgs.append(f"{prefix[:-1]}: {changed}")


def make_projection(channels: int, projection: str, reduction: int) -> nn.Module:
    """Make a query or key projection; see `LayerAttention` for the arguments."""
    if type(reduction) is not int or not 1 <= reduction <= channels:
        raise InputError(f"reduction={reduction!r} must be an integer from 1 to {channels}")
    if projection == "conv1d":
        if reduction != 1:
            raise InputError(f"reduction={reduction} needs projection='linear'")
        size = eca_kernel_size(channels)
        return nn.Conv1d(1, 1, size, padding=size // 2, bias=False)
    return nn.Linear(channels, channels // reduction, bias=False)


def run_projection(projection: nn.Module, pooled: Tensor) -> Tensor:
    """Query or key (B, E) of pooled (B, C), in the weights' precision whatever autocast says."""
    dtype = [*projection.parameters(), pooled][0].dtype
    with functional.without_autocast(pooled):
        projected = projection(pooled.to(dtype).unsqueeze(1)).squeeze(1)
    return projected.to(pooled.dtype)


def is_patched(module: nn.Module) -> bool:
    """Whether a module runs other code than its class: replaced methods or hooks, also global."""
    return bool(
        any(name in module.__dict__ for name in REPLACEABLE)
        or module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_backward_pre_hooks
        or nn_module._global_backward_hooks
    )


def is_depthwise(part: nn.Module, channels: int) -> bool:
    """Whether a module is exactly the depthwise 3x3 convolution that a layer attention builds."""
    return (
        type(part) is nn.Conv2d
        and part.kernel_size == (3, 3)
        and part.groups == part.in_channels == part.out_channels == channels
        and part.stride == part.dilation == part.padding == (1, 1)
        and part.padding_mode == "zeros"
        and part.bias is None
        and not is_patched(part)
    )
