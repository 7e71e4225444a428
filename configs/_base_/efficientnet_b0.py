# EfficientNet-B0 as the backbone of a detector, strides 4 to 32, from torchvision's ImageNet
# weights, with the padding and the eps that they were trained with; those of the ImageNet recipes
# here are mmpretrain's. The name has the version in it because mmengine's own entry leads to a file
# whose name has an outdated hash.
efficientnet_b0 = dict(
    type="PlainEfficientNet",
    arch="b0",
    out_indices=(2, 3, 4, 5),
    conv_cfg=dict(type="Conv2d"),
    norm_cfg=dict(type="BN", eps=1e-5),
    norm_eval=True,
    init_cfg=dict(type="Pretrained", checkpoint="torchvision://efficientnet_b0.imagenet1k_v1"),
)
