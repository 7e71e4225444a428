"""The residual branch: the one place where every CNN backbone calls layer attention."""

from contextlib import suppress

import torch
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmengine.utils import get_object_from_string
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from mrla_mm.arguments import FLAG, RATE, argument_defaults, check_arguments, keywords_of, naming, nearest, placed
from mrla_mm.attention.base import LayerAttention, Memory
from mrla_mm.errors import InputError
from mrla_mm.ops import Affine, FrozenNorm, choose_path


def variants() -> dict[str, type[LayerAttention]]:
    """Registered layer-attention classes by name, a user's own among them."""
    classes = {name: entry for name, entry in MODELS.module_dict.items() if isinstance(entry, type)}
    return {name: cls for name, cls in classes.items() if issubclass(cls, LayerAttention)}


def find_variant(kind: object) -> type[LayerAttention] | None:
    """Return the variant that a `type` means: a registered name or, in configs that import classes, a class.

    Such a config is saved with the class's full path in place of the class.
    """
    if isinstance(kind, str) and "." in kind:
        with suppress(ValueError):  # of a name that begins with the dot
            kind = get_object_from_string(kind)
    found = variants().get(kind) if isinstance(kind, str) else kind
    return found if isinstance(found, type) and issubclass(found, LayerAttention) else None


def build_layer_attention(cfg: dict, channels: int, first_in_stage: bool = False) -> LayerAttention:
    """Build a variant from its config, such as ``dict(type="MRLALight", head_channels=32)``.

    Args:
        cfg: the variant's registered name, or its class, as `type`, and its arguments.
        channels: C of the feature maps.
        first_in_stage: whether the layer starts a stage.

    Raises:
        InputError: if the name or an argument is unknown or cannot work.
    """
    if not isinstance(cfg, dict):
        raise InputError(f"layer_attention={cfg!r} must be a dict such as dict(type='MRLALight', head_channels=32)")
    kind = find_variant(cfg.get("type"))
    if kind is None:
        hint = nearest(str(cfg.get("type")), variants())
        raise InputError(f"layer_attention.type={cfg.get('type')!r} is no variant of layer attention{hint}")
    arguments = {key: value for key, value in cfg.items() if key not in ("type", "_scope_")}
    try:
        return kind(channels, first_in_stage=first_in_stage, **arguments)
    except InputError as error:
        raise InputError(placed("layer_attention", str(error), keywords_of(kind))) from error
    except TypeError as error:
        if wrong := [key for key in arguments if f"unexpected keyword argument {key!r}" in str(error)]:
            hint = nearest(wrong[0], keywords_of(kind) - {"channels", "first_in_stage"})
            key, name = wrong[0], kind.__name__
            raise InputError(f"layer_attention.{key}: {name} has no argument {key!r}{hint}") from error
        raise InputError(f"layer_attention {dict(cfg)} does not fit {kind.__name__}: {error}") from error


def is_frozen(norm: nn.Module) -> bool:
    """Whether a norm is a batch norm that uses its running statistics, a fixed function of each number."""
    return type(norm) is nn.BatchNorm2d and not norm.training and norm.running_mean is not None


def frozen(norm: nn.BatchNorm2d) -> FrozenNorm:
    """Numbers of a batch norm with frozen statistics."""
    return FrozenNorm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)


def is_heard(module: nn.Module) -> bool:
    """Whether somebody listens to what goes into a module or comes out of it, or exchanged its forward.

    Listeners are the module's own hooks and those of all modules, as profilers set them.
    """
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooked = any(getattr(module, kind) or getattr(all_modules, f"_global{kind}") for kind in kinds)
    return hooked or is_exchanged(module)


def is_exchanged(module: nn.Module) -> bool:
    """Whether somebody gave an instance another forward; False while compiling: Dynamo of torch 2.6 lacks `vars`."""
    return not torch.compiler.is_compiling() and "forward" in vars(module)


def build_branch_norm(norm_cfg: dict, channels: int) -> nn.Module:
    """Build a norm whose scale learns whatever its config says of requires_grad.

    A fresh one is zero, and behind a norm fixed at zero nothing would ever learn.
    """
    return build_norm_layer({**norm_cfg, "requires_grad": True}, channels)[1]


class LayerAttentionResidual(BaseModule):
    """Layer attention as a residual branch, y = x + drop_path(norm(attention(x, shortcut, memory))).

    The norm's weight starts at zero, so that a fresh branch is an exact identity and the backbone around it computes
    what its plain pretrained weights compute.

    Args:
        attention: config of the layer attention, see `build_layer_attention`.
        channels: C of the feature maps.
        norm_cfg: config of the norm after the attention; it must have a learnable scale if zero_init is set. A
            requires_grad=False in it, which is meant for the norms of plain weights, does not reach the branch.
        drop_path: probability to drop the branch for a sample in training.
        zero_init: start the norm's weight at zero, else at one.
        first_in_stage: whether the layer starts a stage.

    Raises:
        InputError: for a value that cannot work, naming it.
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
    ) -> None:
        super().__init__()
        check_arguments(dict(drop_path=drop_path, zero_init=zero_init), dict(drop_path=RATE, zero_init=FLAG))
        self.attention = build_layer_attention(attention, channels, first_in_stage)
        with naming(self, dict(norm_cfg=norm_cfg)):
            self.norm = build_branch_norm(norm_cfg, channels)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.zero_init = zero_init
        self.reset_scale()

    @property
    def attention_defaults(self) -> dict[str, object]:
        """Arguments of the attention where its config gives none, by which a file of weights is compared."""
        return argument_defaults(type(self.attention))

    def reset_scale(self) -> None:
        """Set the weight of each norm to its start value."""
        for norm in (module for name, module in self.named_children() if name.endswith("norm")):
            weight = getattr(norm, "weight", None)
            if weight is not None:
                nn.init.constant_(weight, 0.0 if self.zero_init else 1.0)
            elif self.zero_init:
                raise InputError(
                    f"{type(norm).__name__} has no weight to start at zero; use a norm_cfg with a learnable scale, "
                    "or zero_init_attention=False"
                )

    def init_weights(self) -> None:
        """Initialise as the parent does, then restore the start value, which the backbone's rules overwrite."""
        super().init_weights()
        self.reset_scale()

    def forward(
        self, x: Tensor, shortcut: Tensor, memory: Memory = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Add the attention to x.

        Args:
            x: the block's output.
            shortcut: the block's identity path.
            memory: what the earlier layers of the stage left.
            keep: factor of the branch for each sample, for a block that drops its layer attention together with itself.

        Shapes:
            x and shortcut (B, C, H, W), keep (B, 1, 1, 1) -> y (B, C, H, W); memory as the attention defines it.
        """
        if self.can_fold() and choose_path(x).path != "reference":
            return self.attention(x, shortcut, memory, self.affine(x, keep))
        out, memory = self.attention(x, shortcut, memory)
        branch = self.drop_path(self.norm(out))
        if keep is not None:
            return x + branch * keep, memory
        new = isinstance(self.norm, nn.BatchNorm2d) and branch.dtype == x.dtype
        if new and not (is_heard(self.norm) or is_heard(self.drop_path)):
            return branch.add_(x), memory  # a map nobody else has; backward of norm and drop path needs their inputs
        return x + branch, memory

    def can_fold(self) -> bool:
        """Whether normalisation and residual can be part of the attention's own passes over memory.

        They can if the norm is a batch norm with frozen statistics, and nobody listens to norm, drop path or
        attention, or exchanged their forward. What comes into the attention stays the same.
        """
        norm, attention = self.norm, self.attention
        heard = attention._forward_hooks or attention._backward_hooks or attention._backward_pre_hooks
        heard = heard or is_exchanged(attention) or is_heard(norm) or is_heard(self.drop_path)
        return attention.takes_affine and is_frozen(norm) and not heard

    def can_end_block(self, c: Tensor, shortcut: Tensor, relu: nn.Module) -> bool:
        """Whether `end_block` can stand for relu(c + shortcut) and forward.

        It can if forward would fold, the attention knows how, and nobody listens to any module on the way or exchanged
        its forward. A compiler chooses by itself what to keep and what to compute again.
        """
        plain = type(relu) is nn.ReLU and c.dtype == shortcut.dtype
        heard = any(is_heard(module) for module in (relu, self, self.attention))
        ours = plain and not heard and self.can_fold() and self.attention.takes_block_end
        return ours and not torch.compiler.is_compiling() and choose_path(c).path != "reference"

    def end_block(self, c: Tensor, shortcut: Tensor, memory: Memory = None) -> tuple[Tensor, Memory]:
        """Compute relu(c + shortcut) and add the attention to it: what forward returns for that x.

        Shapes:
            c and shortcut (B, C, H, W) -> y (B, C, H, W); memory as the attention defines it.
        """
        return self.attention.end_block(c, shortcut, self.affine(c), memory)

    def affine(self, x: Tensor, keep: Tensor | None = None) -> Affine:
        """Norm and drop path, or the factors of the samples that the block drew, as numbers per channel and sample."""
        scale, offset = frozen(self.norm).fold()
        if self.drop_path.training and not isinstance(self.drop_path, nn.Identity):
            drawn = self.drop_path(x.new_ones(x.shape[0], 1, 1, 1))
            keep = drawn if keep is None else keep * drawn
        return Affine(scale, offset, None if keep is None else keep.flatten())
