# ResNet-50 with A2: two blocks of the second stage and three of the third (Table 1).
_base_ = "../_base_/imagenet_resnet_comparator.py"
plugin = dict(cfg=dict(type="mrla_mm.A2"), position="after_conv3")
model = dict(
    backbone=dict(
        plugins=[
            dict(**plugin, stages=(False, True, False, False), blocks=(0, 2)),
            dict(**plugin, stages=(False, False, True, False), blocks=(0, 2, 4)),
        ]
    )
)
