"""A plain ResNet trained for twelve epochs instead of ten, otherwise as mrla_light.py."""

_base_ = "./plain.py"
train_cfg = dict(max_epochs=12)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, end=12, convert_to_iter_based=True),
]
