# PVTv2-B0 as the backbone of a detector, from its authors' ImageNet weights.
pvtv2_b0 = dict(
    type="PVTv2",
    arch="b0",
    drop_path_rate=0.1,
    init_cfg=dict(
        type="Pretrained",
        checkpoint="https://github.com/whai362/PVT/releases/download/v2/pvt_v2_b0.pth",
    ),
)
