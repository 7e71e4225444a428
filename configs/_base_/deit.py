# DeiT and a simple feature pyramid in place of a detector's backbone and neck, from DeiT's ImageNet
# weights. Small and Base are what differs from Tiny.
deit_tiny = dict(
    backbone=dict(
        _delete_=True,
        type="MRLAViT",
        layer_attention=None,
        arch="deit-tiny",
        img_size=224,
        patch_size=16,
        out_type="featmap",
        drop_path_rate=0.1,
        init_cfg=dict(
            type="Pretrained",
            checkpoint="https://dl.fbaipublicfiles.com/deit/deit_tiny_patch16_224-a1311bcf.pth",
        ),
    ),
    neck=dict(_delete_=True, type="SimpleFeaturePyramid", in_channels=192, out_channels=256),
)
deit_small = dict(
    backbone=dict(
        arch="deit-small",
        init_cfg=dict(
            checkpoint="https://dl.fbaipublicfiles.com/deit/deit_small_patch16_224-cd65a155.pth"
        ),
    ),
    neck=dict(in_channels=384),
)
deit_base = dict(
    backbone=dict(
        arch="deit-base",
        init_cfg=dict(
            checkpoint="https://dl.fbaipublicfiles.com/deit/deit_base_patch16_224-b5f2ef4d.pth"
        ),
    ),
    neck=dict(in_channels=768),
)
