# Plain CeiT-T on ImageNet-1K: the baseline that the MRLA recipes are compared with.
_base_ = "../_base_/imagenet_transformer.py"
model = dict(
    backbone=dict(
        type="MRLACeiT", layer_attention=None, arch="ceit-tiny", img_size=224, drop_path_rate=0.1
    ),
    head=dict(in_channels=192),
)
