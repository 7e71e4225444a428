# DeiT-Tiny with MRLA-base on ImageNet-1K (Table 1, App. B.1), from scratch: no branch starts at
# zero.
_base_ = "./deit_tiny_8xb128.py"
model = dict(
    backbone=dict(
        layer_attention=dict(_delete_=True, type="MRLABase", head_channels=16),
        zero_init_attention=False,
    )
)
