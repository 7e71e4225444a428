# EfficientNet in place of a detector's backbone, strides 4 to 32, from torchvision's ImageNet
# weights, with the padding and the eps that they were trained with, as the ImageNet recipes here
# have them. The name has the version in it because mmengine's own entry leads to a file whose name
# has an outdated hash. B1 is what differs from B0.
efficientnet_b0 = dict(
    backbone=dict(
        _delete_=True,
        type="MRLAEfficientNet",
        layer_attention=None,
        arch="b0",
        out_indices=(2, 3, 4, 5),
        conv_cfg=dict(type="Conv2d"),
        norm_cfg=dict(type="BN", eps=1e-5),
        norm_eval=True,
        init_cfg=dict(type="Pretrained", checkpoint="torchvision://efficientnet_b0.imagenet1k_v1"),
    ),
    neck=dict(in_channels=[24, 40, 112, 320]),
)
efficientnet_b1 = dict(
    backbone=dict(
        arch="b1", init_cfg=dict(checkpoint="torchvision://efficientnet_b1.imagenet1k_v1")
    )
)
