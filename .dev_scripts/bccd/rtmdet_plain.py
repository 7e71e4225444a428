"""A plain CSPNeXt in the recipe of rtmdet_light.py."""

_base_ = "./rtmdet_light.py"
model = dict(
    backbone=dict(
        _delete_=True,
        type="CSPNeXt",
        arch="P5",
        expand_ratio=0.5,
        deepen_factor=0.67,
        widen_factor=0.25,
        channel_attention=True,
        norm_cfg=dict(type="BN"),
        act_cfg=dict(type="SiLU", inplace=True),
    )
)
