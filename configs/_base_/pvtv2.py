# PVTv2 in place of a detector's backbone, from its authors' ImageNet weights, and their AdamW. B1
# is what differs from B0.
pvtv2_b0 = dict(
    backbone=dict(
        _delete_=True,
        type="MRLAPVTv2",
        layer_attention=None,
        arch="b0",
        drop_path_rate=0.1,
        init_cfg=dict(
            type="Pretrained",
            checkpoint="https://github.com/whai362/PVT/releases/download/v2/pvt_v2_b0.pth",
        ),
    ),
    neck=dict(in_channels=[32, 64, 160, 256]),
)
pvtv2_b1 = dict(
    backbone=dict(
        arch="b1",
        init_cfg=dict(
            checkpoint="https://github.com/whai362/PVT/releases/download/v2/pvt_v2_b1.pth"
        ),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
pvtv2_adamw = dict(optimizer=dict(_delete_=True, type="AdamW", lr=1e-4, weight_decay=1e-4))
