"""PVTv2 with layer attention, on mmdet's PyramidVisionTransformerV2."""

from mmdet.models.backbones import PyramidVisionTransformerV2
from mmdet.models.backbones.pvt import PVTEncoderLayer
from mmdet.models.layers import nlc_to_nchw
from mmengine.registry import MODELS
from torch import Tensor

from mrla_mm.attention import AttentionConfig, TokenAttentionResidual, attention_config
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.errors import InputError
from mrla_mm.registry import register
from mrla_mm.weights import PretrainedBackbone


@register(MODELS)
class MRLAPVTv2(PretrainedBackbone, PyramidVisionTransformerV2):
    """PVTv2 whose blocks attend to the earlier ones of their stage (MRLA, ICLR 2023).

    mmdet's, by the name of its size. Layer attention is that of Algorithms 2 and 4, with a norm and
    a residual that they do not print (`TokenAttentionResidual`). It has the drop path probability
    of its block (App. B.1), drawn independently; `with_cp` and `frozen_stages` cover it too.

    Args:
        arch: "b0" to "b5".
        layer_attention, zero_init_attention: as in `MRLAResNet`, by default with head_channels=16.
        with_cp: recompute each block in the backward pass instead of saving its activations.
        frozen_stages: number of stages, from the first, to freeze and keep in evaluation mode.
        **kwargs: those of mmdet, which take precedence over the arch's.
    """

    key_layout = "pvtv2"  # the layout of published weight files, see mrla_mm.weights
    arch_settings = {
        "b0": dict(embed_dims=32, num_layers=(2, 2, 2, 2)),
        "b1": dict(embed_dims=64, num_layers=(2, 2, 2, 2)),
        "b2": dict(embed_dims=64, num_layers=(3, 4, 6, 3)),
        "b3": dict(embed_dims=64, num_layers=(3, 4, 18, 3)),
        "b4": dict(embed_dims=64, num_layers=(3, 8, 27, 3)),
        "b5": dict(embed_dims=64, num_layers=(3, 6, 40, 3), mlp_ratios=(4, 4, 4, 4)),
    }

    def __init__(
        self,
        arch: str = "b0",
        layer_attention: AttentionConfig = "MRLALight",
        *,
        zero_init_attention: bool = True,
        with_cp: bool = False,
        frozen_stages: int = 0,
        **kwargs: object,
    ) -> None:
        if arch not in self.arch_settings:
            raise InputError(f"arch={arch!r} must be one of {', '.join(self.arch_settings)}")
        super().__init__(**{**self.arch_settings[arch], **kwargs})
        self.layer_attention = attention_config(layer_attention)
        if self.layer_attention is not None:
            for _, blocks, _ in self.layers:
                for index, block in enumerate(blocks):
                    block.mrla = TokenAttentionResidual(
                        self.layer_attention,
                        block.ffn.embed_dims,
                        drop_path=block.ffn.dropout_layer.drop_prob,
                        zero_init=zero_init_attention,
                        first_in_stage=index == 0,
                    )
        self.with_cp = with_cp
        self.frozen_stages = frozen_stages
        self._freeze_stages()

    def _freeze_stages(self) -> None:
        for stage in self.layers[: max(self.frozen_stages, 0)]:
            stage.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of `out_indices`: (B, 3, height, width) -> (B, C, H, W) each."""
        outs = []
        for index, (patch_embed, blocks, norm) in enumerate(self.layers):
            tokens, grid = patch_embed(x)
            memory = ()  # of the stage
            for block in blocks:
                tokens, *memory = run_checkpointed(
                    self.with_cp, self.run_block, block, grid, tokens, *memory
                )
            x = nlc_to_nchw(norm(tokens), grid)
            if index in self.out_indices:
                outs.append(x)
        return tuple(outs)

    def run_block(
        self, block: PVTEncoderLayer, grid: tuple[int, int], tokens: Tensor, *memory: Tensor
    ) -> tuple[Tensor, ...]:
        """Run a block and its layer attention on tokens (B, H * W, C) of a grid (H, W)."""
        out = block(tokens, grid)
        if self.layer_attention is None:
            return (out,)
        return block.mrla(out, tokens, grid, *memory)
