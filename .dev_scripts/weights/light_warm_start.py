"""Light on the weights of cifar_warm_start.py, otherwise as light.py."""

_base_ = "./light.py"
weights = "work_dirs/weights/warm_start/cifar_warm_start/seed_0/epoch_1.pth"
model = dict(backbone=dict(init_cfg=dict(checkpoint=weights)))
