"""Vision transformer (DeiT) with layer attention, on mmpretrain's VisionTransformer."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks import DropPath
from mmengine.model.weight_init import trunc_normal_
from mmengine.registry import MODELS
from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor, nn

from mrla_mm.attention import AttentionConfig, TokenAttentionResidual, attention_config
from mrla_mm.attention.tokens import Grid, to_map, to_tokens
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.errors import InputError
from mrla_mm.torch_support import is_compiling
from mrla_mm.weights import PretrainedBackbone


@MODELS.register_module(force=True)
class MRLAViT(PretrainedBackbone, VisionTransformer):
    """Vision transformer whose blocks attend to the earlier ones of their stage (MRLA, ICLR 2023).

    Takes images of any size and aspect ratio, to whose grid the positional embedding is
    interpolated. Detectors need ``out_type="featmap"``, which returns maps (B, C, H, W). Layer
    attention is that of Algorithms 2 and 4, with a norm and a residual that they do not print
    (`TokenAttentionResidual`). It has the drop path probability of its block (App. B.1), drawn
    independently; checkpointing and freezing of a block cover it.

    Args:
        arch: "deit-tiny", "deit-small", "deit-base", another name of mmpretrain's, or a dict with
            `embed_dims`, `num_layers`, `num_heads` and `feedforward_channels`.
        layer_attention, zero_init_attention: as in `MRLAResNet`, by default with head_channels=16.
        stage_blocks: number of blocks in each stage, where the last may have fewer; or a list of
            the stages' numbers, which add up to the model's blocks.
        with_dist_token: add DeiT's distillation token after the class token; "cls_token" then
            returns both.
        with_cp: recompute each block in the backward pass instead of saving its activations.
        frozen_stages: freeze the embedding and this many blocks; 0 freezes the embedding alone, -1
            nothing.
    """

    key_layout = "deit"  # the layout of published weight files, see mrla_mm.weights
    embedding_parts = ("dist_token", "pre_norm.")  # beside those that mmpretrain knows

    def __init__(
        self,
        arch: str | dict,
        layer_attention: AttentionConfig = "MRLALight",
        *,
        stage_blocks: int | Sequence[int] = 4,
        zero_init_attention: bool = True,
        with_dist_token: bool = False,
        with_cp: bool = False,
        frozen_stages: int = -1,
        out_indices: int | Sequence[int] = -1,
        **kwargs: object,
    ) -> None:
        if with_dist_token:
            self.num_extra_tokens = 2
        if isinstance(out_indices, Sequence):
            out_indices = list(out_indices)  # mmpretrain writes to it, and refuses other iterables
        super().__init__(arch, out_indices=out_indices, **kwargs)
        for module in self.modules():
            if isinstance(module, DropPath):  # whose NumPy number breaks compiled graphs
                module.drop_prob = float(module.drop_prob)
        self.dist_token = None
        if with_dist_token:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, self.embed_dims))
        self.with_cp = with_cp
        self.layer_attention = attention_config(layer_attention)
        starts = stage_starts(stage_blocks, self.num_layers)
        if self.layer_attention is not None:
            for index, layer in enumerate(self.layers):
                layer.mrla = TokenAttentionResidual(
                    self.layer_attention,
                    self.embed_dims,
                    extra_tokens=self.num_extra_tokens,
                    drop_path=layer.attn.out_drop.drop_prob,
                    zero_init=zero_init_attention,
                    first_in_stage=index in starts,
                )
        self.frozen_stages = frozen_stages
        self._freeze_stages()

    def forward(self, x: Tensor) -> tuple[Tensor | tuple[Tensor, Tensor], ...]:
        """Return one output of type `out_type` for each of `out_indices`.

        Shapes: x (B, 3, height, width) -> "featmap" (B, C, H, W), H = ceil(height / patch size);
        "cls_token" (B, C), or a pair of them with a distillation token; "avg_featmap" (B, C);
        "raw" (B, E + H * W, C) with E extra tokens.
        """
        x, grid = self.embed(x)
        memory = ()
        outs = []
        for index, layer in enumerate(self.layers):
            x, *memory = run_checkpointed(self.with_cp, self.run_block, layer, grid, x, *memory)
            if index in self.out_indices:
                outs.append(self.format_output(index, x, grid))
        return tuple(outs)

    def format_output(self, index: int, x: Tensor, grid: Grid) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output of type `out_type` of a block, given its tokens."""
        if self.final_norm and index == self.num_layers - 1:
            x = self.ln1(x)
        if self.out_type == "cls_token" and self.dist_token is not None:
            return x[:, 0], x[:, 1]
        return self._format_output(x, grid)

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Embed an image (B, 3, height, width): tokens (B, E + H * W, C) and grid (H, W)."""
        x, grid = self.patch_embed(x)
        tokens = [token for token in (self.cls_token, self.dist_token) if token is not None]
        x = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in tokens), x], dim=1)
        return self.pre_norm(self.drop_after_pos(x + self.positions(grid))), grid

    def positions(self, grid: Grid) -> Tensor:
        """Return the positional embedding (1, E + H * W, C) of a grid (H, W)."""
        extra = self.num_extra_tokens
        own = self.patch_resolution
        # the comparison would fix the grid of a compiled or exported graph
        if not is_compiling() and grid == own:
            return self.pos_embed
        maps = to_map(self.pos_embed[:, extra:].float(), own)
        maps = F.interpolate(maps, size=grid, mode=self.interpolate_mode, align_corners=False)
        patches = to_tokens(maps).to(self.pos_embed.dtype)
        return torch.cat([self.pos_embed[:, :extra], patches], dim=1)

    def run_block(
        self, layer: nn.Module, grid: Grid, x: Tensor, *memory: Tensor
    ) -> tuple[Tensor, ...]:
        """Run a block and its layer attention on tokens (B, E + H * W, C) of a grid (H, W)."""
        out = self.run_layer(layer, x, grid)
        if self.layer_attention is None:
            return (out,)
        if layer.mrla.first_in_stage:
            memory = ()
        return layer.mrla(out, x, grid, *memory)

    def run_layer(self, layer: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        """Run a block without its layer attention."""
        return layer(x)

    def init_random(self) -> None:
        """Draw the extra tokens as DeiT does, and initialise the rest as mmpretrain does."""
        for token in (self.cls_token, self.dist_token):
            if token is not None:
                trunc_normal_(token, std=0.02)
        super().init_random()

    def _freeze_stages(self) -> None:
        if self.frozen_stages >= 0:
            super()._freeze_stages()
            if self.dist_token is not None:
                self.dist_token.requires_grad = False

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Return a parameter's depth for layer-wise learning rate decay, and the number of depths.

        Layer attention has the depth of its block; all of the embedding has depth 0.
        """
        if param_name.startswith(tuple(f"{prefix}{part}" for part in self.embedding_parts)):
            param_name = f"{prefix}patch_embed"
        return super().get_layer_depth(param_name, prefix)


def stage_starts(stage_blocks: int | Sequence[int], depth: int) -> frozenset[int]:
    """Return the indices of the blocks that start a stage; see `MRLAViT` for `stage_blocks`."""
    uniform = isinstance(stage_blocks, int)
    if uniform and stage_blocks > 0:
        return frozenset(range(0, depth, stage_blocks))
    if uniform or min(stage_blocks) < 1 or sum(stage_blocks) != depth:
        raise InputError(f"stage_blocks={stage_blocks!r} must be positive or add up to {depth}")
    return frozenset(accumulate(stage_blocks[:-1], initial=0))
