"""The smallest configurations of backbones of other libraries."""

STAGE = dict(num_branches=1, num_modules=1, block="BASIC", num_blocks=(2,), num_channels=(18,))
HRNET = dict(
    stage1=dict(STAGE, block="BOTTLENECK", num_channels=(8,)),
    stage2=dict(STAGE, num_branches=2, num_blocks=(2, 2), num_channels=(18, 36)),
    stage3=dict(STAGE, num_branches=3, num_blocks=(2,) * 3, num_channels=(18, 36, 72)),
    stage4=dict(STAGE, num_branches=4, num_blocks=(2,) * 4, num_channels=(18, 36, 72, 144)),
)
CSP = dict(deepen_factor=0.33, widen_factor=0.25)
PVT = dict(embed_dims=16, num_layers=(2, 2, 2, 2))
VIT = dict(embed_dims=48, num_layers=3, num_heads=3)
ARCH = dict(embed_dims=48, num_layers=3, num_heads=3, feedforward_channels=96)
TWINS = dict(
    embed_dims=[16] * 4,
    depths=[3] * 4,
    num_heads=[1] * 4,
    mlp_ratios=[2] * 4,
    patch_sizes=[4, 2, 2, 2],
    strides=[4, 2, 2, 2],
    sr_ratios=[8, 4, 2, 1],
)
RESNET18 = dict(type="mmseg.ResNetV1c", depth=18)
STDC = dict(
    stdc_type="STDCNet1",
    in_channels=3,
    channels=(32, 64, 256, 512, 1024),
    bottleneck_type="cat",
    norm_cfg=dict(type="BN"),
    act_cfg=dict(type="ReLU"),
)
TRIDENT = dict(num_branch=3, test_branch_idx=1, trident_dilations=(1, 2, 3), num_stages=3)
TRIDENT |= dict(strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2,))
SWIN_ARCH = dict(embed_dims=32, depths=[2] * 4, num_heads=[1, 2, 4, 8])
MIXER = dict(embed_dims=48, num_layers=3, tokens_mlp_dims=32, channels_mlp_dims=64)
LARGE_KERNELS = dict(large_kernel_sizes=[7] * 4, layers=[2] * 4, channels=[16, 16, 32, 32])
REP_MLP = dict(channels=[16, 16, 32, 32], depths=[2] * 4)
TNT = dict(embed_dims_outer=48, embed_dims_inner=8, num_layers=3, num_heads_outer=3)
HOURGLASS = dict(stage_channels=[16] * 6, stage_blocks=[2] * 6, num_stacks=1, feat_channel=16)
SMALL = dict(depth=50, base_channels=16)
SMALL_RESNETS = """
    mmdet.Res2Net mmdet.ResNeSt mmpretrain.Res2Net mmpretrain.ResNeSt mmpretrain.ResNet
    mmpretrain.ResNetV1c mmpretrain.ResNetV1d mmpretrain.ResNet_CIFAR mmseg.ResNeSt mmseg.ResNet
    mmseg.ResNetV1c mmseg.ResNetV1d
"""
TRANSFORMERS = """
    mmpretrain.BEiTViT mmpretrain.DeiT3 mmpretrain.DistilledVisionTransformer
    mmpretrain.RevVisionTransformer mmpretrain.VisionTransformer
"""
RESNEXTS = ("mmdet.ResNeXt", "mmpretrain.ResNeXt", "mmseg.ResNeXt")
ARGUMENTS = {
    **dict.fromkeys(SMALL_RESNETS.split(), SMALL),
    **dict.fromkeys(TRANSFORMERS.split(), dict(arch=ARCH)),
    **dict.fromkeys(RESNEXTS, dict(SMALL, groups=4)),
    **dict.fromkeys(("mmdet.HRNet", "mmpretrain.HRNet", "mmseg.HRNet"), dict(extra=HRNET)),
    "mmdet.CSPDarknet": CSP,
    "mmdet.CSPNeXt": CSP,
    "mmdet.DetectoRS_ResNet": dict(SMALL, conv_cfg=dict(type="ConvAWS")),
    "mmdet.DetectoRS_ResNeXt": dict(SMALL, groups=4, conv_cfg=dict(type="ConvAWS")),
    "mmdet.HourglassNet": HOURGLASS,
    "mmdet.MobileNetV2": dict(widen_factor=0.5),
    "mmdet.PyramidVisionTransformer": PVT,
    "mmdet.PyramidVisionTransformerV2": PVT,
    "mmdet.RegNet": dict(arch="regnetx_400mf"),
    "mmdet.ResNet": dict(depth=18, base_channels=16),
    "mmdet.ResNetV1d": dict(depth=18, base_channels=16),
    "mmdet.SSDVGG": dict(depth=16, out_indices=(3, 4), out_feature_indices=(22, 34)),
    "mmdet.SwinTransformer": dict(embed_dims=32, num_heads=(1, 2, 4, 8)),
    "mmdet.TridentResNet": dict(SMALL, **TRIDENT),
    "mmpretrain.CSPDarkNet": dict(depth=53),
    "mmpretrain.CSPResNeXt": dict(depth=50),
    "mmpretrain.CSPResNet": dict(depth=50),
    "mmpretrain.ConvMixer": dict(arch=dict(embed_dims=32, depth=3, patch_size=7, kernel_size=5)),
    "mmpretrain.ConvNeXt": dict(arch="atto", out_indices=(0, 1, 2, 3), gap_before_final_norm=False),
    "mmpretrain.DaViT": dict(arch=dict(embed_dims=24, depths=[1, 1, 3, 1], num_heads=[1, 1, 1, 1])),
    "mmpretrain.EfficientNetV2": dict(arch="b0"),
    "mmpretrain.HiViT": dict(arch="tiny", out_indices=[0]),
    "mmpretrain.LeViT": dict(arch="128s"),
    "mmpretrain.MViT": dict(arch="tiny"),
    "mmpretrain.MixMIMTransformer": dict(arch=SWIN_ARCH),
    "mmpretrain.MlpMixer": dict(arch=MIXER),
    "mmpretrain.MobileOne": dict(arch="s0"),
    "mmpretrain.PCPVT": dict(arch=TWINS),
    "mmpretrain.PyramidVig": dict(arch="tiny"),
    "mmpretrain.RegNet": dict(arch="regnetx_400mf"),
    "mmpretrain.RepLKNet": dict(arch=dict(LARGE_KERNELS, small_kernel=3, dw_ratio=1)),
    "mmpretrain.RepMLPNet": dict(arch=dict(REP_MLP, sharesets_nums=[1, 2, 4, 8])),
    "mmpretrain.RepVGG": dict(arch="A0"),
    "mmpretrain.SEResNeXt": dict(depth=50, groups=4),
    "mmpretrain.SEResNet": dict(SMALL, se_ratio=4),
    "mmpretrain.SVT": dict(arch=dict(TWINS, window_sizes=[7] * 4)),
    "mmpretrain.SparseConvNeXt": dict(arch="atto"),
    "mmpretrain.SparseResNet": dict(depth=18),
    "mmpretrain.SwinTransformer": dict(arch=SWIN_ARCH),
    "mmpretrain.SwinTransformerV2": dict(arch=dict(SWIN_ARCH, extra_norm_every_n_blocks=0)),
    "mmpretrain.T2T_ViT": dict(embed_dims=48, num_layers=3),
    "mmpretrain.TNT": dict(arch=dict(TNT, num_heads_inner=2)),
    "mmpretrain.VGG": dict(depth=11),
    "mmpretrain.ViTSAM": dict(arch=dict(ARCH, global_attn_indexes=[0])),
    "mmpretrain.Vig": dict(arch="tiny"),
    "mmpretrain.XCiT": dict(embed_dims=48, depth=3, num_heads=3),
    "mmseg.BEiT": VIT,
    "mmseg.BiSeNetV1": dict(backbone_cfg=RESNET18),
    "mmseg.DeconvModule": dict(in_channels=3, out_channels=8),
    "mmseg.ICNet": dict(backbone_cfg=RESNET18, layer_channels=(128, 512)),
    "mmseg.InterpConv": dict(in_channels=3, out_channels=8),
    "mmseg.MAE": VIT,
    "mmseg.MSCAN": dict(embed_dims=[16, 32, 32, 64], depths=[2, 2, 2, 2], norm_cfg=dict(type="BN")),
    "mmseg.MixVisionTransformer": dict(embed_dims=16, num_layers=[2, 2, 2, 2]),
    "mmseg.PCPVT": dict(embed_dims=[16, 32, 64, 128], depths=[3, 3, 3, 3]),
    "mmseg.PIDNet": dict(channels=16, ppm_channels=24),
    "mmseg.STDCContextPathNet": dict(
        backbone_cfg=dict(STDC, type="mmseg.STDCNet"),
        ffm_cfg=dict(in_channels=384, out_channels=256, scale_factor=4),
    ),
    "mmseg.STDCNet": STDC,
    "mmseg.SVT": dict(embed_dims=[16, 32, 64]),
    "mmseg.SwinTransformer": dict(embed_dims=32, num_heads=(1, 2, 4, 8)),
    "mmseg.UNet": dict(base_channels=8),
    "mmseg.VisionTransformer": VIT,
}
TIMM_DEFAULTS = """
    caformer_s18 coat_lite_tiny convnext_atto cspresnet50 densenet121 dla34 edgenext_xx_small
    efficientformer_l1 efficientnet_b0 ese_vovnet19b_slim fastvit_t8 focalnet_tiny_srf
    ghostnet_050 hgnetv2_b0 hrnet_w18_small lcnet_050 levit_128s mambaout_femto mixer_s32_224
    mobilenetv3_small_050 mobilenetv4_conv_small_050 mobilevit_xxs nest_tiny poolformer_s12
    pvt_v2_b0 regnety_008 repvgg_a0 repvit_m0_9 resnest14d skresnet18 starnet_s050
    twins_svt_small visformer_tiny volo_d1_224
"""
SWIN = dict(img_size=128, window_size=4, embed_dim=24, num_heads=(1, 2, 4, 8))
TIMM = {
    **dict.fromkeys(TIMM_DEFAULTS.split(), {}),
    "davit_tiny": dict(embed_dims=(24, 48, 48, 96), num_heads=(1, 2, 4, 8)),
    "efficientvit_b0": dict(features_only=True),
    "inception_next_atto": dict(features_only=True),
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "vit_tiny_patch16_224": dict(embed_dim=48, depth=3),
}
