# EfficientNet-B1 with MRLA-light on ImageNet-1K (Table 1, App. B.1), from scratch: no branch starts
# at zero.
_base_ = "./efficientnet_b1_8xb96.py"
model = dict(
    backbone=dict(
        type="MRLAEfficientNet",
        layer_attention=dict(type="MRLALight", head_channels=8),
        zero_init_attention=False,
    )
)
