"""What every layer-attention variant shares: its projections, its heads and its contract."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from mrla_mm.arguments import FLAG, check_arguments, check_maps, one_of, optional, whole
from mrla_mm.errors import InputError
from mrla_mm.ops import Affine, depthwise_value, global_average, project, split_heads

Memory = tuple | None  # what earlier layers of a stage left: a NamedTuple of tensors, or nothing yet
RULES = dict(
    channels=whole(1),
    head_channels=whole(1),
    value=one_of("dwconv", "dwconv_gelu", "identity"),
    projection=one_of("conv1d", "linear"),
    reduction=whole(1),
    kernel_size=optional(whole(1)),
    first_in_stage=FLAG,
)


def eca_kernel_size(channels: int) -> int:
    """Kernel size of the query and key convolutions, the rule of ECA-Net: 3 at 64 channels, 5 at 256, 7 at 2048."""
    size = int(abs(math.log2(channels) + 1) / 2)
    return size if size % 2 else size + 1


class LayerAttention(nn.Module):
    """One layer's attention over the earlier layers of its stage.

    The contract is ``out, memory = attention(x, shortcut, memory)``: memory is what the earlier layers of the stage
    left (a small tuple of tensors, or None at the first one), is passed along and never kept on the module.

    Args:
        channels: C of the feature maps.
        head_channels: D, consecutive channels that share one attention weight; Table 4 (f).
        value: "dwconv" for a depthwise 3x3 convolution, "dwconv_gelu" for its GELU (Algorithm 4), "identity" for the
            feature map itself, Table 4 (c).
        projection: "conv1d" for a convolution along the channels, "linear" for full linear layers, Table 4 (d).
        reduction: the linear layers project C to C // reduction channels; 16 gives the paper's 28.2 M parameters.
        kernel_size: of the convolution along the channels, odd; by default `eca_kernel_size`.
        first_in_stage: this layer starts a stage, so it never has a history. Set by the stage.

    Raises:
        InputError: for a value that cannot work, naming it.
    """

    token_defaults = dict(head_channels=16)  # where a transformer's config does not say otherwise (Sec. 5)

    def __init__(
        self,
        channels: int,
        head_channels: int = 32,
        *,
        value: str = "dwconv",
        projection: str = "conv1d",
        reduction: int = 1,
        kernel_size: int | None = None,
        first_in_stage: bool = False,
    ) -> None:
        super().__init__()
        own = dict(value=value, projection=projection, reduction=reduction, kernel_size=kernel_size)
        both = dict(channels=channels, head_channels=head_channels)
        check_arguments(both | own | dict(first_in_stage=first_in_stage), RULES)
        if channels % head_channels:
            divisors = [size for size in range(1, channels + 1) if channels % size == 0]
            near = " or ".join(map(str, sorted(sorted(divisors, key=lambda size: abs(size - head_channels))[:2])))
            raise InputError(
                f"head_channels={head_channels} does not cut channels={channels} into equal heads; choose a divisor of "
                f"{channels}, such as {near}"
            )
        self.channels = channels
        self.heads = channels // head_channels
        self.first_in_stage = first_in_stage
        self.query = make_projection(channels, self.heads, projection, reduction, kernel_size)
        self.key = make_projection(channels, self.heads, projection, reduction, kernel_size)
        self.value = make_value(channels, value)
        self.value_gelu = value == "dwconv_gelu"

    @property
    def uses_shortcut(self) -> bool:
        """Whether the block's shortcut enters the attention."""
        return False

    def project_query(self, pooled: Tensor) -> Tensor:
        """Query of pooled features, f_Q: (B, C) -> (B, G, D)."""
        return split_heads(project(pooled, self.query.weight), self.heads)

    def project_key(self, pooled: Tensor) -> Tensor:
        """Key of pooled features, f_K: (B, C) -> (B, G, D)."""
        return split_heads(project(pooled, self.key.weight), self.heads)

    def query_and_key(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key of a feature map: (B, C, H, W) -> two (B, G, D)."""
        pooled = global_average(x)
        return self.project_query(pooled), self.project_key(pooled)

    def project_value(self, x: Tensor) -> Tensor:
        """Value of a feature map, f_V: (B, C, H, W) -> (B, C, H, W)."""
        value = depthwise_value(x, None if self.value is None else self.value.weight)
        return F.gelu(value) if self.value_gelu else value

    def check(self, x: Tensor, memory: Memory, *earlier: Tensor) -> None:
        """Raise InputError unless x and the earlier maps (B, C, H, W) agree and the memory belongs here."""
        check_maps(x, self.channels, what="maps")
        if self.first_in_stage and memory is not None:
            raise InputError("the first layer of a stage was given a memory; start each stage with memory=None")
        for tensor in earlier:
            if tensor.shape != x.shape:
                raise InputError(
                    f"history of shape {tuple(tensor.shape)} meets a map of shape {tuple(x.shape)}; "
                    "layer attention needs one shape within a stage"
                )

    @property
    def takes_affine(self) -> bool:
        """Whether forward can also do the residual branch's work, given an `Affine` as its fourth argument."""
        return False

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: Memory = None, affine: Affine | None = None
    ) -> tuple[Tensor, Memory]:
        """Attend: x and shortcut (B, C, H, W) and the stage's memory -> out (B, C, H, W) and the new memory.

        A variant that takes an affine returns x + keep (scale out + offset) for out when it is given one.
        """
        raise NotImplementedError

    @property
    def takes_block_end(self) -> bool:
        """Whether `end_block` can do the sum and ReLU that lead to x, too."""
        return False

    def end_block(self, c: Tensor, shortcut: Tensor, affine: Affine, memory: Memory = None) -> tuple[Tensor, Memory]:
        """Attend to x = relu(c + shortcut): what forward returns for x, the shortcut, memory and affine.

        For a variant with `takes_block_end`. Shapes: c and shortcut (B, C, H, W) -> (B, C, H, W) and the new memory.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Show the heads, which no submodule shows."""
        return f"channels={self.channels}, heads={self.heads}"


def make_projection(
    channels: int, heads: int, projection: str, reduction: int, kernel_size: int | None
) -> nn.Conv1d | nn.Linear:
    """Hold the weight of a query or key projection; see `LayerAttention` for the arguments."""
    if projection == "conv1d":
        if reduction != 1:
            raise InputError(f"reduction={reduction} needs projection='linear'; a convolution keeps the channels")
        size = eca_kernel_size(channels) if kernel_size is None else kernel_size
        if size % 2 == 0:
            raise InputError(f"kernel_size={size} must be odd")
        return nn.Conv1d(1, 1, size, padding=size // 2, bias=False)
    if kernel_size is not None:
        raise InputError(f"kernel_size={kernel_size} needs projection='conv1d'")
    if channels % (reduction * heads):
        raise InputError(
            f"reduction={reduction} must divide head_channels={channels // heads}, leaving a channel a head"
        )
    return nn.Linear(channels, channels // reduction, bias=False)


def make_value(channels: int, value: str) -> nn.Conv2d | None:
    """Hold the weight of the value convolution, or nothing for the identity."""
    if value == "identity":
        return None
    return nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
