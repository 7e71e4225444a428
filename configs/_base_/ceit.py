# CeiT and a simple feature pyramid in place of a detector's backbone and neck. Small is what
# differs from Tiny. CeiT's weights are published nowhere they could be fetched from: pre-train with
# configs/imagenet/ceit_tiny_8xb128.py and so on first.
ceit_tiny = dict(
    backbone=dict(
        _delete_=True,
        type="MRLACeiT",
        layer_attention=None,
        arch="ceit-tiny",
        img_size=224,
        out_type="featmap",
        drop_path_rate=0.1,
        norm_eval=True,
        init_cfg=dict(
            type="Pretrained",
            checkpoint="work_dirs/ceit_tiny_8xb128/epoch_300.pth",
            prefix="backbone.",
        ),
    ),
    neck=dict(_delete_=True, type="SimpleFeaturePyramid", in_channels=192, out_channels=256),
)
ceit_small = dict(
    backbone=dict(
        arch="ceit-small", init_cfg=dict(checkpoint="work_dirs/ceit_small_8xb128/epoch_300.pth")
    ),
    neck=dict(in_channels=384),
)
