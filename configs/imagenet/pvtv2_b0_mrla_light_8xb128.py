# PVTv2-B0 with MRLA-light on ImageNet-1K (Table 1, App. B.1), from scratch: no branch starts at
# zero.
_base_ = "./pvtv2_b0_8xb128.py"
model = dict(
    backbone=dict(
        layer_attention=dict(_delete_=True, type="MRLALight", head_channels=16),
        zero_init_attention=False,
    )
)
