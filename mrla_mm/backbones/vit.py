"""Vision transformer (DeiT), plain and with layer attention after every block, on mmpretrain's VisionTransformer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmengine.model.weight_init import trunc_normal_
from mmengine.registry import MODELS
from mmpretrain.models.backbones import VisionTransformer
from mmpretrain.models.utils import resize_pos_embed
from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from mrla_mm.arguments import FLAG, check_arguments, check_keywords, check_maps, naming, whole
from mrla_mm.attention import Memory, TokenAttentionResidual
from mrla_mm.attention.tokens import to_map, to_tokens
from mrla_mm.backbones.transformer_arguments import RULES, check_arch, check_out_indices, stage_starts
from mrla_mm.errors import InputError
from mrla_mm.ops import is_exporting


@MODELS.register_module()
class ViT(VisionTransformer):
    """Plain vision transformer with what mmpretrain's lacks: distillation token, checkpointing and frozen blocks.

    Takes images of any size and aspect, the positional embedding interpolated to their grid. For detection put out
    maps (B, C, H, W) with ``out_type="featmap"``. Weights of mmpretrain's ``VisionTransformer`` load.

    Args:
        arch: "deit-tiny", "deit-small", "deit-base", another name of mmpretrain's, or a dict with `embed_dims`,
            `num_layers`, `num_heads` and `feedforward_channels`.
        with_dist_token: have DeiT's distillation token behind the class token; "cls_token" then puts out both.
        with_cp: recompute each block in the backward pass instead of keeping what it saw.
        frozen_stages: freeze the embedding and this many blocks; at 0 the embedding alone, at -1 nothing.
        out_indices: blocks whose output to put out, ascending; negative ones count from the end.
        **kwargs: those of mmpretrain's ``VisionTransformer``.

    Raises:
        InputError: for a value that cannot work, naming it.
    """

    key_layout = "deit"  # of the files its weights are published in, see mrla_mm.weights

    def __init__(
        self,
        arch: str | dict,
        *,
        with_dist_token: bool = False,
        with_cp: bool = False,
        frozen_stages: int = -1,
        out_indices: int | Sequence[int] = -1,
        **kwargs: object,
    ) -> None:
        check_keywords(type(self), kwargs)
        depth = check_arch(arch, self.arch_zoo)["num_layers"]
        own = dict(with_dist_token=with_dist_token, with_cp=with_cp, frozen_stages=frozen_stages)
        check_arguments({**own, **kwargs}, RULES | dict(frozen_stages=whole(-1, depth)))
        if with_dist_token:
            if not kwargs.get("with_cls_token", True):
                raise InputError("with_dist_token=True needs with_cls_token=True")
            self.num_extra_tokens = 2
        blocks = check_out_indices(out_indices, depth)
        with naming(self, dict(arch=arch, out_indices=blocks, **kwargs)):
            super().__init__(arch, out_indices=blocks, **kwargs)
        self.in_channels = kwargs.get("in_channels", 3)
        for module in self.modules():
            if isinstance(module, DropPath):
                module.drop_prob = float(module.drop_prob)  # numpy's in mmpretrain, which breaks a compiled graph
        self.dist_token = nn.Parameter(torch.zeros(1, 1, self.embed_dims)) if with_dist_token else None
        self.with_cp = with_cp
        self.frozen_stages = frozen_stages
        self._freeze_stages()

    def forward(self, x: Tensor) -> tuple[Tensor | tuple[Tensor, Tensor], ...]:
        """Put out what `out_type` says, one entry per index of `out_indices`.

        Shapes:
            x (B, 3, height, width) -> "featmap" (B, C, H, W), H = ceil(height / patch size); "cls_token" (B, C), or a
            pair of them with a distillation token; "avg_featmap" (B, C); "raw" (B, E + H * W, C).

        Raises:
            InputError: if x is no batch of images, or they are smaller than a patch.
        """
        check_maps(x, self.in_channels)
        x, grid = self.embed(x)
        memory, outs = None, []
        for index in range(self.num_layers):
            if self.with_cp and is_grad_enabled():
                x, memory = checkpoint(self.run_block, index, x, memory, grid, use_reentrant=False)
            else:
                x, memory = self.run_block(index, x, memory, grid)
            if self.final_norm and index == self.num_layers - 1:
                x = self.ln1(x)
            if index in self.out_indices:
                outs.append(self._format_output(x, grid))
        return tuple(outs)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Cut an image into tokens with their positions: (B, 3, height, width) -> (B, E + H * W, C) and (H, W)."""
        patch = self.patch_embed.projection.kernel_size
        if x.shape[2] < patch[0] or x.shape[3] < patch[1]:
            raise InputError(
                f"an input of {x.shape[2]} x {x.shape[3]} pixels is smaller than a patch of {patch[0]} x {patch[1]}; "
                "enlarge the images or take a smaller patch_size"
            )
        x, grid = self.patch_embed(x)
        extra = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.dist_token) if token is not None]
        x = torch.cat([*extra, x], dim=1)
        return self.pre_norm(self.drop_after_pos(x + self.positions(grid))), grid

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Positional embedding (1, E + H * W, C) of a grid (H, W)."""
        extra, own = self.num_extra_tokens, self.patch_resolution
        if not is_exporting():
            return resize_pos_embed(self.pos_embed, own, grid, self.interpolate_mode, extra)
        # mmpretrain's compares the grid with its own, which would bind an exported graph to what came out; here a grid
        # of the same size comes through the interpolation unchanged
        maps = to_map(self.pos_embed[:, extra:].float(), own)
        patches = to_tokens(F.interpolate(maps, size=grid, mode=self.interpolate_mode, align_corners=False))
        return torch.cat([self.pos_embed[:, :extra], patches.to(self.pos_embed.dtype)], dim=1)

    def run_block(self, index: int, x: Tensor, memory: Memory, grid: tuple[int, int]) -> tuple[Tensor, Memory]:
        """Run a block on tokens (B, E + H * W, C); a plain one has no memory."""
        return self.layers[index](x), None

    def _prepare_pos_embed(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        """Resize the positions of a state dict to the model's grid as mmpretrain does, which takes square grids alone.

        Raises:
            InputError: if they are of another grid that is not square.
        """
        try:
            super()._prepare_pos_embed(state_dict, prefix, *args)
        except (AssertionError, RuntimeError) as error:
            raise InputError(
                f"{prefix}pos_embed of shape {tuple(state_dict[prefix + 'pos_embed'].shape)} cannot be resized to "
                f"{tuple(self.pos_embed.shape)}: its grid is not square, or its tokens are others; build the model "
                "with the img_size and patch_size the file was made with"
            ) from error

    def _format_output(self, x: Tensor, hw: tuple[int, int]) -> Tensor | tuple[Tensor, Tensor]:
        if self.out_type == "cls_token" and self.dist_token is not None:
            return x[:, 0], x[:, 1]
        return super()._format_output(x, hw)

    def init_weights(self) -> None:
        """Initialise as mmpretrain does, and the extra tokens as DeiT does.

        Tokens and positions come first, for pretrained weights to replace them: mmpretrain draws the positions last,
        over those just loaded if `init_cfg` is a list.
        """
        for parameter in (self.cls_token, self.dist_token, self.pos_embed):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)
        super(VisionTransformer, self).init_weights()

    def _freeze_stages(self) -> None:
        """Freeze as `frozen_stages` says."""
        if self.frozen_stages < 0:
            return
        super()._freeze_stages()
        self.pre_norm.eval()
        if self.dist_token is not None:
            self.dist_token.requires_grad = False

    def train(self, mode: bool = True) -> "ViT":
        """Switch mode, frozen blocks staying in eval mode, and return the module, which mmpretrain's does not."""
        super().train(mode)
        self._freeze_stages()
        return self

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Depth of a parameter for layer-wise learning rate decay, and the number of depths.

        A block's layer attention has the depth of the block; the embedding and its tokens come first.
        """
        if param_name == f"{prefix}dist_token":
            param_name = f"{prefix}cls_token"
        return super().get_layer_depth(param_name, prefix)


@MODELS.register_module()
class MRLAViT(ViT):
    """Vision transformer whose blocks query what the earlier blocks of their stage saw (MRLA, ICLR 2023).

    The drop path of a block, its checkpointing and its freezing cover its layer attention (Algorithms 2 and 4).

    Args:
        arch: see `ViT`.
        layer_attention: config of the variant, ``dict(type="MRLALight", head_channels=16)`` by default.
        stage_blocks: blocks in a stage, the last stage may have fewer; or the number of blocks of each stage. Stages
            bound the memory; a variant without one, as MRLA-light with previous="shortcut", has none.
        zero_init_attention: start each branch as an exact identity, so that plain ViT weights keep their meaning.
        **kwargs: those of `ViT`.

    Raises:
        InputError: for a value that cannot work, naming it.

    Example:
        >>> import torch
        >>> from mrla_mm.backbones import MRLAViT
        >>> backbone = MRLAViT("deit-tiny", out_type="featmap", out_indices=(3, 7, 11)).eval()
        >>> for level in backbone(torch.rand(1, 3, 96, 160)):
        ...     print(tuple(level.shape))
        (1, 192, 6, 10)
        (1, 192, 6, 10)
        (1, 192, 6, 10)
    """

    def __init__(
        self,
        arch: str | dict,
        layer_attention: dict | None = None,
        *,
        stage_blocks: int | Sequence[int] = 4,
        zero_init_attention: bool = True,
        **kwargs: object,
    ) -> None:
        check_arguments(dict(zero_init_attention=zero_init_attention), dict(zero_init_attention=FLAG))
        super().__init__(arch, **kwargs)
        default = dict(type="MRLALight", head_channels=16)
        self.layer_attention = default if layer_attention is None else layer_attention
        self.starts = stage_starts(stage_blocks, self.num_layers)
        for index, layer in enumerate(self.layers):
            layer.mrla = TokenAttentionResidual(
                self.layer_attention,
                self.embed_dims,
                extra_tokens=self.num_extra_tokens,
                drop_path=float(layer.attn.out_drop.drop_prob),
                zero_init=zero_init_attention,
                first_in_stage=index in self.starts,
            )
        self._freeze_stages()

    def run_block(self, index: int, x: Tensor, memory: Memory, grid: tuple[int, int]) -> tuple[Tensor, Memory]:
        """Run a block and its layer attention on tokens (B, E + H * W, C); the memory is reset where a stage starts."""
        out, _ = super().run_block(index, x, None, grid)
        return self.layers[index].mrla(out, x, None if index in self.starts else memory, grid=grid)
