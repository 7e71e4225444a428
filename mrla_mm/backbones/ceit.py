"""CeiT (Yuan et al., ICCV 2021) with layer attention."""

from collections.abc import Sequence

import torch
from mmcv.cnn import ConvModule, build_norm_layer
from mmcv.cnn.bricks.transformer import FFN
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from mmpretrain.models.utils import to_2tuple
from torch import Tensor, nn

from mrla_mm.attention import AttentionConfig
from mrla_mm.attention.tokens import Grid, to_map, to_tokens
from mrla_mm.backbones.vit import MRLAViT
from mrla_mm.errors import InputError

STEM_STRIDE = 4  # of the convolutional stem
PATCH = 4  # side of the patches of the stem's map
LCA_OPTIONS = ("drop_rate", "qkv_bias", "norm_cfg")  # that the block over class tokens shares


class LocallyEnhancedFeedForward(BaseModule):
    """Feed-forward layer with a depthwise convolution over the patches (LeFF, Sec. 3.3 of CeiT).

    patches = BN(linear(GELU(BN(depthwise 3x3(GELU(BN(linear(patches)))))))); extra tokens pass
    through. Layer scale, drop path and the identity follow. As in CeiT's released code there is no
    activation after the last norm. Sizes, activation and dropout are as in the FFN it replaces.
    """

    def __init__(self, ffn: FFN, extra_tokens: int, norm_cfg: dict) -> None:
        super().__init__()
        if getattr(ffn, "num_fcs", None) != 2:  # SwiGLU has none
            raise InputError(f"layer_cfgs: {type(ffn).__name__} must be an FFN with num_fcs=2")
        self.extra_tokens = extra_tokens
        hidden = ffn.feedforward_channels
        # Each norm follows its convolution, as mmcv's fuse_conv_bn expects.
        self.conv1 = nn.Conv2d(ffn.embed_dims, hidden, 1)
        self.bn1 = build_norm_layer(norm_cfg, hidden)[1]
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.bn2 = build_norm_layer(norm_cfg, hidden)[1]
        self.conv3 = nn.Conv2d(hidden, ffn.embed_dims, 1)
        self.bn3 = build_norm_layer(norm_cfg, ffn.embed_dims)[1]
        hidden_layer, _, self.drop = ffn.layers
        self.act = hidden_layer[1]
        self.gamma2 = ffn.gamma2  # layer scale, as mmcv names it
        self.drop_path = ffn.dropout_layer

    def forward(self, tokens: Tensor, identity: Tensor, grid: Grid) -> Tensor:
        """Transform tokens (B, E + H * W, C) of a grid (H, W) and add the identity."""
        extra = self.extra_tokens
        x = to_map(tokens[:, extra:], grid)  # (B, C, H, W)
        x = self.act(self.bn1(self.conv1(x)))  # (B, hidden, H, W)
        x = self.act(self.bn2(self.conv2(x)))
        x = to_tokens(self.drop(self.bn3(self.conv3(x))))  # (B, H * W, C)
        return identity + self.drop_path(self.gamma2(torch.cat([tokens[:, :extra], x], dim=1)))


class CeiTLayer(TransformerEncoderLayer):
    """mmpretrain's block with a feed-forward layer that knows the grid of its tokens."""

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Transform tokens (B, E + H * W, C) of a grid (H, W)."""
        x = x + self.attn(self.ln1(x))
        return self.ffn(self.ln2(x), x, grid)


@MODELS.register_module(force=True)
class MRLACeiT(MRLAViT):
    """CeiT whose blocks attend to the earlier ones of their stage (MRLA, ICLR 2023).

    A vision transformer with a convolutional stem, LeFF and class-token attention, and the layer
    attention of `MRLAViT`. A patch covers 16 x 16 pixels of the image. With
    ``out_type="cls_token"``, and only then, the last block's class token attends to the class
    tokens of all blocks (LCA, Sec. 3.4 of CeiT).

    Args:
        arch: "ceit-tiny", "ceit-small", or a dict with `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`.
        img_size: size in pixels of the images that the positional embedding is made for.
        stem_channels: channels of the stem's map; 64 gives CeiT's published 6.4 M and 24.2 M
            parameters.
        out_indices: as in mmpretrain, but a class token comes from the last block alone.
        batch_norm_cfg: config of the batch norms of stem and feed-forward, by default
            ``dict(type="BN")``.
        norm_eval: keep the batch norms in evaluation mode during training.
    """

    embedding_parts = (*MRLAViT.embedding_parts, "stem.")
    arch_zoo = {
        "ceit-tiny": dict(embed_dims=192, num_layers=12, num_heads=3, feedforward_channels=768),
        "ceit-small": dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
    }

    def __init__(
        self,
        arch: str | dict,
        layer_attention: AttentionConfig = "MRLALight",
        *,
        img_size: int | tuple[int, int] = 224,
        in_channels: int = 3,
        stem_channels: int = 64,
        out_type: str = "cls_token",
        out_indices: int | Sequence[int] = -1,
        batch_norm_cfg: dict | None = None,
        norm_eval: bool = False,
        frozen_stages: int = -1,
        **kwargs: object,
    ) -> None:
        super().__init__(
            arch,
            layer_attention,
            img_size=tuple(-(-side // STEM_STRIDE) for side in to_2tuple(img_size)),
            patch_size=PATCH,
            in_channels=stem_channels,
            out_type=out_type,
            out_indices=out_indices,
            **kwargs,
        )
        self.frozen_stages = frozen_stages  # from here on, or the parent would freeze too early
        self.img_size = to_2tuple(img_size)
        self.norm_eval = norm_eval
        norms = batch_norm_cfg or dict(type="BN")
        self.stem = nn.Sequential(
            ConvModule(in_channels, stem_channels, 7, 2, 3, norm_cfg=norms, act_cfg=None),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        for layer in self.layers:
            layer.__class__ = CeiTLayer  # mmpretrain's constructor takes no class of blocks
            layer.ffn = LocallyEnhancedFeedForward(layer.ffn, self.num_extra_tokens, norms)
        self.lca = None
        if out_type == "cls_token":
            if self.out_indices != [self.num_layers - 1]:
                raise InputError(f"out_indices={out_indices}: only the last has a class token")
            if self.dist_token is not None:
                raise InputError("with_dist_token=True: the LCA takes no distillation token")
            self.out_indices = range(self.num_layers)  # the LCA takes the class tokens of all
            options = dict(norm_cfg=dict(type="LN", eps=1e-6)) | kwargs
            shared = {name: options[name] for name in LCA_OPTIONS if name in options}
            self.lca = TransformerEncoderLayer(
                self.embed_dims,
                self.arch_settings["num_heads"],
                self.arch_settings["feedforward_channels"],
                **shared,
            )
        self._freeze_stages()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one output of type `out_type` for each of `out_indices`; see `MRLAViT`."""
        outs = super().forward(x)
        if self.lca is None:
            return outs
        # Only the last token's query matters; the others cost little, with one token per block.
        token = self.lca(torch.stack(outs, dim=1))[:, -1]  # (B, C)
        return (self.ln1(token) if self.final_norm else token,)

    def format_output(self, index, x, grid):
        """Return the output of a block or, before the final norm, the class token for the LCA."""
        return super().format_output(index, x, grid) if self.lca is None else x[:, 0]

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Embed patches of the stem's map; see `MRLAViT`."""
        return super().embed(self.stem(x))

    def run_layer(self, layer, x, grid):
        """Run a block without its layer attention."""
        return layer(x, grid)

    def _freeze_stages(self) -> None:
        """Freeze the stem with the embedding, and the LCA with the last block."""
        super()._freeze_stages()
        if self.frozen_stages >= 0:
            self.stem.eval().requires_grad_(False)
        if self.frozen_stages == self.num_layers and self.lca is not None:
            self.lca.eval().requires_grad_(False)
