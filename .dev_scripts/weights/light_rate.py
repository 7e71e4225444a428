"""Light on plain weights, at five times the learning rate, otherwise as light.py."""

_base_ = "./light.py"
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={"mrla": dict(lr_mult=5.0)}))
