"""CeiT (Yuan et al., Incorporating Convolution Designs into Visual Transformers, 2021), plain and with MRLA."""

from collections.abc import Sequence

import torch
from mmcv.cnn import ConvModule, build_norm_layer
from mmcv.cnn.bricks import DropPath
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from mmpretrain.models.utils import to_2tuple
from torch import Tensor, nn

from mrla_mm.arguments import FLAG, MAP_NORM, PIXELS, check_arguments, naming, optional, whole
from mrla_mm.attention import Memory
from mrla_mm.attention.tokens import to_map, to_tokens
from mrla_mm.backbones.norm_eval import evaluate_batch_norms
from mrla_mm.backbones.transformer_arguments import check_arch, check_out_indices
from mrla_mm.backbones.vit import MRLAViT, ViT
from mrla_mm.errors import InputError

STEM_STRIDE, PATCH = 4, 4  # of the convolutional stem, and of the patches cut from its maps
OWN_PARTS = ("patch_size", "patch_cfg", "layer_cfgs", "pre_norm", "layer_scale_init_value", "with_dist_token")

RULES = dict(
    img_size=PIXELS,
    in_channels=whole(1),
    stem_channels=whole(1),
    batch_norm_cfg=optional(MAP_NORM),
    norm_eval=FLAG,
)


class ImageToTokens(nn.Sequential):
    """Stem that turns an image into the map that patches are cut from: 7x7 convolution, batch norm, max pooling.

    Shapes:
        (B, in_channels, height, width) -> (B, channels, height / 4, width / 4), rounded up.
    """

    def __init__(self, in_channels: int, channels: int, norm_cfg: dict) -> None:
        super().__init__(
            ConvModule(in_channels, channels, 7, stride=2, padding=3, norm_cfg=norm_cfg, act_cfg=None),
            nn.MaxPool2d(3, stride=2, padding=1),
        )


class LocallyEnhancedFeedForward(BaseModule):
    """Feed-forward layer with a depthwise convolution over the patch tokens (LeFF, Sec. 3.3 of CeiT).

    patches = BN(linear(GELU(BN(depthwise 3x3(GELU(BN(linear(patches)))))))), while extra tokens pass through; then drop
    path and the identity. As in CeiT's released code no activation follows the last norm.

    Args:
        channels: C of the tokens.
        hidden_channels: channels between the two linear layers.
        extra_tokens: number of tokens in front of the patches.
        drop: probability to drop an element of the patches in training.
        drop_path: probability to drop the layer for a sample in training.
        norm_cfg: config of the batch norms.
    """

    def __init__(
        self,
        channels: int,
        hidden_channels: int,
        *,
        extra_tokens: int = 1,
        drop: float = 0.0,
        drop_path: float = 0.0,
        norm_cfg: dict | None = None,
    ) -> None:
        super().__init__()
        norm_cfg = norm_cfg or dict(type="BN")
        self.extra_tokens = extra_tokens
        self.conv1 = nn.Conv2d(channels, hidden_channels, 1)
        self.conv2 = nn.Conv2d(hidden_channels, hidden_channels, 3, padding=1, groups=hidden_channels)
        self.conv3 = nn.Conv2d(hidden_channels, channels, 1)
        self.bn1, self.bn2, self.bn3 = (
            build_norm_layer(norm_cfg, width)[1] for width in (hidden_channels, hidden_channels, channels)
        )
        self.act = nn.GELU()
        self.drop = nn.Dropout(drop)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor, identity: Tensor, grid: tuple[int, int]) -> Tensor:
        """Feed tokens (B, E + H * W, C) of a grid (H, W) forward and add them to the identity of the same shape.

        Raises:
            InputError: if the tokens do not fit the grid.
        """
        extra = self.extra_tokens
        if tokens.shape[1] != extra + grid[0] * grid[1]:
            raise InputError(
                f"{tokens.shape[1]} tokens do not fit a {grid[0]} x {grid[1]} grid with {extra} extra tokens"
            )
        x = to_map(tokens[:, extra:], grid)  # (B, C, H, W)
        x = self.act(self.bn1(self.conv1(x)))  # (B, hidden, H, W)
        x = self.act(self.bn2(self.conv2(x)))
        x = to_tokens(self.drop(self.bn3(self.conv3(x))))  # (B, H * W, C)
        return identity + self.drop_path(torch.cat([tokens[:, :extra], x], dim=1))


@MODELS.register_module()
class CeiT(ViT):
    """CeiT: a vision transformer with a convolutional stem, locally-enhanced feed-forward and class-token attention.

    Takes images of any size and aspect and of at least 16 x 16 pixels; a patch covers 16 x 16 of them. The class token
    that ``out_type="cls_token"`` puts out is the last block's after it attended to the class tokens of all blocks
    (LCA, Sec. 3.4 of CeiT); other outputs need and have no LCA.

    Args:
        arch: "ceit-tiny", "ceit-small", or a dict with `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`.
        img_size: pixels of the images the positional embedding is made for.
        in_channels: channels of the images.
        stem_channels: channels of the stem's map; 64 gives CeiT's published 6.4 M and 24.2 M parameters.
        out_type: "cls_token", "featmap", "avg_featmap" or "raw", see mmpretrain's ``VisionTransformer``.
        out_indices: see `ViT`; a class token has only the last block.
        batch_norm_cfg: config of the batch norms of stem and feed-forward.
        norm_eval: keep the batch norms in evaluation during training.
        **kwargs: those of `ViT`, except what CeiT has parts of its own for.

    Raises:
        InputError: for a value that cannot work, naming it.

    Example:
        >>> import torch
        >>> from mrla_mm.backbones import CeiT
        >>> tuple(CeiT("ceit-tiny").eval()(torch.rand(1, 3, 96, 160))[0].shape)
        (1, 192)
    """

    arch_zoo = {
        "ceit-tiny": dict(embed_dims=192, num_layers=12, num_heads=3, feedforward_channels=768),
        "ceit-small": dict(embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
    }

    def __init__(
        self,
        arch: str | dict = "ceit-tiny",
        *,
        img_size: int | tuple[int, int] = 224,
        in_channels: int = 3,
        stem_channels: int = 64,
        out_type: str = "cls_token",
        out_indices: int | Sequence[int] = -1,
        batch_norm_cfg: dict | None = None,
        norm_eval: bool = False,
        **kwargs: object,
    ) -> None:
        for name in OWN_PARTS:
            if name in kwargs:
                raise InputError(f"CeiT has parts of its own in place of {name}={kwargs[name]!r}; drop it")
        settings = check_arch(arch, self.arch_zoo)
        own = dict(img_size=img_size, in_channels=in_channels, stem_channels=stem_channels)
        check_arguments({**own, "batch_norm_cfg": batch_norm_cfg, "norm_eval": norm_eval}, RULES)
        depth, wants_class = settings["num_layers"], out_type == "cls_token"
        if wants_class and check_out_indices(out_indices, depth) != [depth - 1]:
            raise InputError(
                f"out_indices={out_indices} with out_type='cls_token' must be the last block, where the class token "
                "attends to all blocks; use out_type='featmap' for maps of several blocks"
            )
        pixels = to_2tuple(img_size)
        super().__init__(
            arch,
            img_size=tuple(-(-side // STEM_STRIDE) for side in pixels),
            patch_size=PATCH,
            in_channels=stem_channels,
            out_type=out_type,
            out_indices=range(depth) if wants_class else out_indices,
            **kwargs,
        )
        self.img_size = pixels
        self.in_channels = in_channels
        batch_norm_cfg = dict(type="BN") if batch_norm_cfg is None else batch_norm_cfg
        with naming(self, dict(batch_norm_cfg=batch_norm_cfg)):
            self.stem = ImageToTokens(in_channels, stem_channels, batch_norm_cfg)
        for layer in self.layers:
            layer.ffn = LocallyEnhancedFeedForward(
                self.embed_dims,
                settings["feedforward_channels"],
                extra_tokens=self.num_extra_tokens,
                drop=kwargs.get("drop_rate", 0.0),
                drop_path=float(layer.attn.out_drop.drop_prob),
                norm_cfg=batch_norm_cfg,
            )
        self.norm_eval = norm_eval
        self.lca = None
        if wants_class:
            self.final_norm, self.norms_class = False, self.final_norm  # the norm follows the LCA, not the last block
            self.lca = TransformerEncoderLayer(
                self.embed_dims,
                settings["num_heads"],
                settings["feedforward_channels"],
                drop_rate=kwargs.get("drop_rate", 0.0),
                qkv_bias=kwargs.get("qkv_bias", True),
                norm_cfg=kwargs.get("norm_cfg", dict(type="LN", eps=1e-6)),
            )
        self._freeze_stages()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Put out what `out_type` says, one entry per index of `out_indices`; the shapes are those of `ViT`.

        Raises:
            InputError: if the image is smaller than a patch.
        """
        outs = super().forward(x)
        if self.lca is None:
            return outs
        # The query of the last token alone matters. The others cost little: there is one token per block.
        token = self.lca(torch.stack(outs, dim=1))[:, -1]  # (B, C)
        return (self.ln1(token) if self.norms_class else token,)

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Cut an image into tokens behind the stem: (B, 3, height, width) -> (B, E + H * W, C) and (H, W)."""
        patch = STEM_STRIDE * PATCH
        if min(x.shape[2:]) < patch:
            raise InputError(
                f"an input of {x.shape[2]} x {x.shape[3]} pixels is smaller than a patch of {patch} x {patch}; "
                "enlarge the images"
            )
        return super().embed(self.stem(x))

    def run_block(self, index: int, x: Tensor, memory: Memory, grid: tuple[int, int]) -> tuple[Tensor, Memory]:
        """Run a block on tokens (B, E + H * W, C); a plain one has no memory."""
        layer = self.layers[index]
        x = x + layer.attn(layer.ln1(x))
        return layer.ffn(layer.ln2(x), x, grid), None

    def _freeze_stages(self) -> None:
        """Freeze as `frozen_stages` says; the LCA and its norm together with the last block."""
        super()._freeze_stages()
        if self.frozen_stages < 0 or not hasattr(self, "lca"):  # the parent's constructor calls before there is a stem
            return
        self.stem.eval().requires_grad_(False)
        if self.frozen_stages == self.num_layers and self.lca is not None:
            for module in (self.lca, *([self.ln1] if self.norms_class else [])):
                module.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> "CeiT":
        """Switch mode; frozen parts stay in evaluation, and all batch norms if `norm_eval` says so."""
        super().train(mode)
        if mode and self.norm_eval:
            evaluate_batch_norms(self)
        return self

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Depth of a parameter for layer-wise learning rate decay; the stem comes first, the LCA last."""
        if param_name.startswith(f"{prefix}stem."):
            param_name = f"{prefix}patch_embed"
        return super().get_layer_depth(param_name, prefix)


@MODELS.register_module()
class MRLACeiT(MRLAViT, CeiT):
    """CeiT whose blocks query what the earlier blocks of their stage saw (MRLA, ICLR 2023; Algorithms 2 and 4).

    Takes the arguments of `MRLAViT` for the layer attention and those of `CeiT` for the rest. Its 12 blocks are three
    stages of four. The class tokens that meet in the LCA are those behind the layer attention of each block.

    Raises:
        InputError: for a value that cannot work, naming it.

    Example:
        >>> import torch
        >>> from mrla_mm.backbones import MRLACeiT
        >>> backbone = MRLACeiT("ceit-tiny", out_type="featmap", out_indices=(3, 7, 11)).eval()
        >>> for level in backbone(torch.rand(1, 3, 96, 160)):
        ...     print(tuple(level.shape))
        (1, 192, 6, 10)
        (1, 192, 6, 10)
        (1, 192, 6, 10)
    """

    def __init__(self, arch: str | dict = "ceit-tiny", layer_attention: dict | None = None, **kwargs: object) -> None:
        super().__init__(arch, layer_attention, **kwargs)
