"""Light on weights that were trained with it, otherwise as light.py."""

_base_ = "./light.py"
weights = "work_dirs/weights/cifar/cifar_light/seed_0/epoch_6.pth"
model = dict(backbone=dict(init_cfg=dict(checkpoint=weights)))
