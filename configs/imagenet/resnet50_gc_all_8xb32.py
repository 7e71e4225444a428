# ResNet-50 with GC blocks in all stages but the first, on ImageNet-1K (Table 1).
_base_ = "../_base_/imagenet_resnet_comparator.py"
model = dict(
    backbone=dict(
        plugins=[
            dict(
                cfg=dict(type="ContextBlock", ratio=1 / 16),
                stages=(False, True, True, True),
                position="after_conv3",
            )
        ]
    )
)
