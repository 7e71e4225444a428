"""A plain ResNet in the recipe of mrla_light.py."""

_base_ = "./mrla_light.py"
model = dict(
    backbone=dict(
        _delete_=True,
        type="ComparatorResNet",
        depth=50,
        base_channels=16,
        stem_channels=16,
        frozen_stages=-1,
        norm_eval=False,
        zero_init_residual=False,
    )
)
