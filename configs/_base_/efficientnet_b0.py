# EfficientNet-B0 as the backbone of a detector, strides 4 to 32, from the ImageNet weights that mmpretrain names.
efficientnet_b0 = dict(
    type="EfficientNet",
    arch="b0",
    out_indices=(2, 3, 4, 5),
    norm_eval=True,
    init_cfg=dict(
        type="Pretrained",
        prefix="backbone",
        checkpoint="https://download.openmmlab.com/mmclassification/v0/efficientnet/"
        "efficientnet-b0_3rdparty_8xb32-aa_in1k_20220119-8d939117.pth",
    ),
)
