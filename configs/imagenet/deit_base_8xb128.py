# Plain DeiT-Base on ImageNet-1K: the baseline that the MRLA recipes are compared with.
_base_ = "../_base_/imagenet_transformer.py"
model = dict(
    backbone=dict(
        type="MRLAViT",
        layer_attention=None,
        arch="deit-base",
        img_size=224,
        patch_size=16,
        drop_path_rate=0.1,
    ),
    head=dict(in_channels=768),
)
