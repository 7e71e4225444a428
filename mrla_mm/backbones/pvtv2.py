"""PVTv2 with layer attention after every block, on mmdet's PyramidVisionTransformerV2."""

from mmdet.models.backbones import PyramidVisionTransformerV2
from mmdet.models.backbones.pvt import PVTEncoderLayer, pvt_convert
from mmdet.models.layers import nlc_to_nchw
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmengine.runner import CheckpointLoader
from torch import Tensor, is_grad_enabled
from torch.utils.checkpoint import checkpoint

from mrla_mm.arguments import (
    CONFIG,
    FLAG,
    INIT,
    RATE,
    Rule,
    check_arguments,
    check_keywords,
    check_maps,
    indices,
    naming,
    one_of,
    optional,
    whole,
    wholes,
)
from mrla_mm.attention import Memory, TokenAttentionResidual
from mrla_mm.errors import InputError

STAGES = 4  # of every PVTv2: mmdet fixes the patch sizes of four
RULES = dict(
    with_cp=FLAG,
    frozen_stages=whole(0, STAGES),
    in_channels=whole(1),
    embed_dims=whole(1),
    num_stages=whole(STAGES, STAGES),
    out_indices=indices(STAGES),
    qkv_bias=FLAG,
    act_cfg=CONFIG,
    init_cfg=INIT,
    norm_cfg=CONFIG,
    convert_weights=FLAG,
    pretrained=optional(Rule("the place of a weight file", lambda value: isinstance(value, str))),
    **dict.fromkeys(("num_layers", "num_heads", "strides", "sr_ratios", "mlp_ratios"), wholes(1, STAGES)),
    **dict.fromkeys(("drop_rate", "attn_drop_rate", "drop_path_rate"), RATE),
)


@MODELS.register_module()
class PVTv2(PyramidVisionTransformerV2):
    """Plain PVTv2 by its size's name, with what mmdet's lacks: checkpointing, freezing and use as a classifier.

    Weights of mmdet's ``PyramidVisionTransformerV2`` and, through its conversion, those of PVTv2's authors load.

    Args:
        arch: "b0" to "b5".
        with_cp: recompute each block in the backward pass instead of keeping its tensors.
        frozen_stages: number of stages, from the first, whose parameters stay as they are and that run in evaluation.
        **kwargs: those of mmdet's ``PyramidVisionTransformerV2``; they come before what `arch` says.

    Raises:
        InputError: for an unknown arch, or for `frozen_stages` out of range.
    """

    arch_settings = {
        "b0": dict(embed_dims=32, num_layers=(2, 2, 2, 2)),
        "b1": dict(embed_dims=64, num_layers=(2, 2, 2, 2)),
        "b2": dict(embed_dims=64, num_layers=(3, 4, 6, 3)),
        "b3": dict(embed_dims=64, num_layers=(3, 4, 18, 3)),
        "b4": dict(embed_dims=64, num_layers=(3, 8, 27, 3)),
        "b5": dict(embed_dims=64, num_layers=(3, 6, 40, 3), mlp_ratios=(4, 4, 4, 4)),
    }

    def __init__(self, arch: str = "b0", *, with_cp: bool = False, frozen_stages: int = 0, **kwargs: object) -> None:
        check_keywords(type(self), kwargs)
        own = dict(arch=arch, with_cp=with_cp, frozen_stages=frozen_stages)
        check_arguments({**own, **kwargs}, RULES | dict(arch=one_of(*self.arch_settings)))
        if "pretrain_img_size" in kwargs:
            raise InputError(
                f"pretrain_img_size={kwargs['pretrain_img_size']!r} does nothing: PVTv2 has no positions of a fixed "
                "image size; drop it"
            )
        with naming(self, dict(arch=arch, **kwargs)):
            super().__init__(**{**self.arch_settings[arch], **kwargs})
        self.in_channels = kwargs.get("in_channels", 3)
        self.with_cp = with_cp
        self.frozen_stages = frozen_stages
        self.freeze_stages()

    def init_weights(self) -> None:
        """Initialise as mmdet does; of weight files, translate those of PVTv2's authors and leave others to mmengine.

        Raises:
            InputError: if a file of the authors is of another size.
        """
        if not self.init_cfg:
            super().init_weights()
        elif (state := self.read_authors_file()) is None:
            BaseModule.init_weights(self)
        else:
            self.load_authors_weights(pvt_convert(state))

    def read_authors_file(self) -> dict[str, Tensor] | None:
        """Return the state dict of `init_cfg` if its keys are those of PVTv2's authors."""
        cfg = self.init_cfg
        from_file = isinstance(cfg, dict) and cfg.get("checkpoint") and not cfg.get("prefix")
        if not self.convert_weights or not from_file:
            return None
        state = CheckpointLoader.load_checkpoint(cfg["checkpoint"], map_location="cpu")
        state = state.get("state_dict", state.get("model", state))
        return state if "patch_embed1.proj.weight" in state else None

    def load_authors_weights(self, state: dict[str, Tensor]) -> None:
        """Load all of a translated state dict, layer attention aside; mmdet loads what happens to fit."""
        own = self.state_dict()
        misfits = [key for key, value in state.items() if key not in own or value.shape != own[key].shape]
        misfits += [key for key in own if key not in state and ".mrla." not in key]
        if misfits:
            raise InputError(
                f"the weights {self.init_cfg['checkpoint']} are not of this {type(self).__name__}: {len(misfits)} "
                f"tensors do not match, {misfits[0]} among them; choose the file of the same arch"
            )
        self.load_state_dict(state, strict=False)

    def freeze_stages(self) -> None:
        """Keep the frozen stages from learning, and in evaluation."""
        for stage in self.layers[: self.frozen_stages]:
            stage.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> "PVTv2":
        """Switch mode, frozen stages excepted."""
        super().train(mode)
        self.freeze_stages()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of `out_indices`: (B, 3, H, W) -> (B, C, H / stride, W / stride) each.

        Raises:
            InputError: if x is no batch of images, or they are too small for the spatial reduction of a stage.
        """
        check_maps(x, self.in_channels)
        size, outs = tuple(x.shape[2:]), []
        for index, (patch_embed, blocks, norm) in enumerate(self.layers):
            tokens, grid = patch_embed(x)
            if min(grid) < self.sr_ratios[index]:
                raise InputError(
                    f"an image of {size[0]} x {size[1]} pixels leaves stage {index} a {grid[0]} x {grid[1]} grid, "
                    f"smaller than its reduction sr_ratios[{index}]={self.sr_ratios[index]}; use larger images"
                )
            x = nlc_to_nchw(norm(self.run_stage(blocks, tokens, grid)), grid)
            if index in self.out_indices:
                outs.append(x)
        return tuple(outs)

    def run_stage(self, blocks: list[PVTEncoderLayer], tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Run the blocks of a stage: (B, H * W, C) -> (B, H * W, C)."""
        memory = None
        for block in blocks:
            if self.with_cp and is_grad_enabled():
                tokens, memory = checkpoint(self.run_block, block, tokens, grid, memory, use_reentrant=False)
            else:
                tokens, memory = self.run_block(block, tokens, grid, memory)
        return tokens

    def run_block(
        self, block: PVTEncoderLayer, tokens: Tensor, grid: tuple[int, int], memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Run one block; a plain one has no memory."""
        return block(tokens, grid), None


@MODELS.register_module()
class MRLAPVTv2(PVTv2):
    """PVTv2 whose blocks query what the earlier blocks of their stage saw (MRLA, ICLR 2023; Algorithms 2 and 4).

    There are no extra tokens. The layer attention of a block is dropped in training with the block's probability
    (App. B.1); checkpointing and freezing cover it as they cover the block.

    Args:
        arch: "b0" to "b5".
        layer_attention: config of the variant, ``dict(type="MRLALight", head_channels=16)`` by default.
        zero_init_attention: start each branch as an exact identity, so that plain weights keep their meaning.
        **kwargs: those of `PVTv2`.

    Raises:
        InputError: for an unknown arch or variant, or heads that do not divide the channels of a stage.

    Example:
        >>> import torch
        >>> from mrla_mm.backbones import MRLAPVTv2
        >>> backbone = MRLAPVTv2("b0").eval()
        >>> for level in backbone(torch.rand(1, 3, 64, 96)):
        ...     print(tuple(level.shape))
        (1, 32, 16, 24)
        (1, 64, 8, 12)
        (1, 160, 4, 6)
        (1, 256, 2, 3)
    """

    def __init__(
        self,
        arch: str = "b0",
        layer_attention: dict | None = None,
        *,
        zero_init_attention: bool = True,
        **kwargs: object,
    ) -> None:
        check_arguments(dict(zero_init_attention=zero_init_attention), dict(zero_init_attention=FLAG))
        super().__init__(arch, **kwargs)
        default = dict(type="MRLALight", head_channels=16)
        self.layer_attention = default if layer_attention is None else layer_attention
        for _, blocks, _ in self.layers:
            for index, block in enumerate(blocks):
                block.mrla = TokenAttentionResidual(
                    self.layer_attention,
                    block.ffn.embed_dims,
                    drop_path=block.ffn.dropout_layer.drop_prob,
                    zero_init=zero_init_attention,
                    first_in_stage=index == 0,
                )
        self.freeze_stages()

    def init_weights(self) -> None:
        """Initialise as the plain model, whose rules for layer norms do not know the start of a branch."""
        super().init_weights()
        if not self.init_cfg:
            for _, blocks, _ in self.layers:
                for block in blocks:
                    block.mrla.reset_zero_init()

    def run_block(
        self, block: PVTEncoderLayer, tokens: Tensor, grid: tuple[int, int], memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Run one block and its layer attention."""
        return block.mrla(block(tokens, grid), tokens, memory, grid=grid)
