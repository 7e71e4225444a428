# RetinaNet on a plain EfficientNet-B1, 1x schedule: the baseline that the MRLA configs are compared
# with.
_base_ = "./retinanet_efficientnet_b0_1x.py"
model = dict(
    backbone=dict(
        arch="b1", init_cfg=dict(checkpoint="torchvision://efficientnet_b1.imagenet1k_v1")
    )
)
