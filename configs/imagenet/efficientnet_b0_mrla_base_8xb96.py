# EfficientNet-B0 with MRLA-base on ImageNet-1K (Table 1, App. B.1), from scratch: no branch starts
# at zero.
_base_ = "./efficientnet_b0_8xb96.py"
model = dict(
    backbone=dict(
        type="MRLAEfficientNet",
        layer_attention=dict(type="MRLABase", head_channels=8),
        zero_init_attention=False,
    )
)
