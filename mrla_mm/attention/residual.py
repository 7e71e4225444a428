"""The residual branch: the one place where every CNN backbone calls layer attention."""

from numbers import Real

import torch
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, fx, nn

from mrla_mm.attention.base import Memory, check_choice, is_patched
from mrla_mm.errors import InputError
from mrla_mm.functional import frozen_norm


def build_branch_norm(norm_cfg: dict, channels: int) -> nn.Module:
    """Build a norm with a learnable scale: one frozen at zero would block every gradient."""
    return build_norm_layer({**norm_cfg, "requires_grad": True}, channels)[1]


def defines_add_to(kind: type) -> bool:
    """Whether a class has an `add_to` that belongs to its forward, not to a parent's."""
    owner = next(each for each in kind.__mro__ if {"forward", "add_to"} & vars(each).keys())
    return "add_to" in vars(owner)


class AttentionResidual(BaseModule):
    """Layer attention as a residual branch, over maps or tokens.

    The norm's weight and bias start at zero, so that a fresh branch is an exact identity and the
    backbone around it computes what its plain pretrained weights compute. An attention with an
    `activation` has it after the norm.

    Args:
        attention: config of the layer attention, built with `channels` and `first_in_stage`.
        norm_cfg: config of the norm after the attention; a requires_grad=False in it is ignored.
        drop_path: probability to drop the branch for a sample in training.
        zero_init: start the norm's weight at zero, else at one.
        first_in_stage: the layer starts a stage, so its memory is empty.
        has_shortcut: whether the block has a shortcut; without, the layer has no parameters for it.

    Raises:
        InputError: drop_path is not in [0, 1); or zero_init asks for a norm with a weight, and this
            one has none, or an activation after it, where such a weight may never learn.
    """

    def __init__(
        self,
        attention: dict,
        channels: int,
        *,
        norm_cfg: dict,
        drop_path: float = 0.0,
        zero_init: bool = True,
        first_in_stage: bool = False,
        has_shortcut: bool = True,
    ) -> None:
        super().__init__()
        check_choice("zero_init_attention", zero_init, (True, False))
        is_number = isinstance(drop_path, Real) and not isinstance(drop_path, bool)  # numpy's too
        if not is_number or not 0 <= drop_path < 1:
            raise InputError(f"drop_path={drop_path!r} of layer attention must be in [0, 1)")
        self.channels = channels
        self.first_in_stage = first_in_stage
        self.has_shortcut = has_shortcut
        self.attention = MODELS.build(
            dict(**attention, channels=channels, first_in_stage=first_in_stage)
        )
        if not has_shortcut and hasattr(self.attention, "remove_shortcut"):
            self.attention.remove_shortcut()
        kind = type(self.attention)
        self.add_to_class = kind if defines_add_to(kind) else None
        self.norm = build_branch_norm(norm_cfg, channels)
        activation = getattr(self.attention, "activation", None)
        if activation and zero_init:
            raise InputError(
                f"the {activation.__name__} of {type(self.attention).__name__} lets no gradient "
                "through to a norm that starts at zero: set zero_init_attention=False"
            )
        self.activation = activation and activation()
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.zero_init = zero_init
        self.reset_zero_init()

    def reset_zero_init(self) -> None:
        """Set weight and bias of `norm`, and of any other child `..._norm`, to their start."""
        norms = [child for name, child in self.named_children() if name.endswith("norm")]
        for norm in norms:
            if getattr(norm, "weight", None) is not None:
                nn.init.constant_(norm.weight, 0.0 if self.zero_init else 1.0)
            elif self.zero_init:
                raise InputError(
                    f"{type(norm).__name__} has no weight to start at zero; use a norm_cfg with a "
                    "learnable scale, or zero_init_attention=False"
                )
            if getattr(norm, "bias", None) is not None:
                nn.init.zeros_(norm.bias)

    def init_weights(self) -> None:
        """Initialise as the parent does, then restore the start values that it overwrites."""
        super().init_weights()
        self.reset_zero_init()

    def check_memory(self, memory: Memory) -> None:
        """Refuse a memory that checkpointing could not track."""
        tensors = Tensor, fx.Proxy  # with which torch.fx traces
        if not isinstance(memory, tuple) or not all(isinstance(each, tensors) for each in memory):
            raise InputError(
                f"the memory that {type(self.attention).__name__} returns must be a flat tuple of "
                "tensors, empty for none, with numbers as tensors too"
            )

    def activate(self, branch: Tensor) -> Tensor:
        """Run the activation of the attention, if it has one."""
        return branch if self.activation is None else self.activation(branch)


class LayerAttentionResidual(AttentionResidual):
    """Layer attention over maps: y = x + drop_path(norm(attention(x, shortcut, memory)))."""

    def forward(
        self, x: Tensor, shortcut: Tensor | None, *memory: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Add the attention to x; return y and the new memory.

        A factor for each sample, keep (B, 1, 1, 1), takes the place of the branch's own drop path.

        Shapes:
            x and shortcut (B, C, H, W) -> y (B, C, H, W); memory as the attention defines it.
        """
        if self.can_fold_norm(x):
            # Expanded, scale and offset get gradients that are sums over the same pixels as the
            # gate's, which a compiler computes in one pass.
            scale, offset = (each.expand(x.shape[0], -1) for each in frozen_norm(self.norm))
            if keep is not None:
                scale = keep.flatten(1) * scale
                offset = keep.flatten(1) * offset
            y, memory = self.attention.add_to(x, shortcut, memory, scale, offset)
            self.check_memory(memory)
            return (y, *memory)
        out, memory = self.attention(x, shortcut, memory)
        self.check_memory(memory)
        branch = self.activate(self.norm(out))
        branch = self.drop_path(branch) if keep is None else branch * keep
        return (x + branch, *memory)

    def can_fold_norm(self, x: Tensor) -> bool:
        """Whether attention, norm and drop path may be `add_to`: all frozen, none with hooks."""
        norm, drop_path = self.norm, self.drop_path
        if type(norm) is not nn.BatchNorm2d or norm.training or norm.running_mean is None:
            return False
        drops = isinstance(drop_path, DropPath) and drop_path.training
        if drops or type(drop_path) not in (DropPath, nn.Identity):
            return False
        return (
            isinstance(x, Tensor)  # a graph of torch.fx has to run in both modes of the norm
            # with maps of other channels, or float32 statistics of a float64 map, the norm raises
            and norm.num_features == self.channels
            and (norm.running_mean.dtype == torch.float64) == (x.dtype == torch.float64)
            and type(self.attention) is self.add_to_class  # not one that has replaced it
            and self.activation is None
            and not any(is_patched(part) for part in (self.attention, norm, drop_path))
        )
