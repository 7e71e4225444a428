# Plain PVTv2-B0 on ImageNet-1K: the baseline that the MRLA recipes are compared with.
_base_ = "../_base_/imagenet_transformer.py"
model = dict(
    backbone=dict(
        type="MRLAPVTv2", layer_attention=None, arch="b0", out_indices=(3,), drop_path_rate=0.1
    ),
    neck=dict(type="GlobalAveragePooling"),
    head=dict(in_channels=256),
)
