"""MRLA-light added to the weights of cifar_plain.py and trained for one epoch more."""

_base_ = "./cifar_light.py"
plain = "work_dirs/weights/cifar/cifar_plain/seed_0/epoch_6.pth"
init_cfg = dict(type="Pretrained", checkpoint=plain)
model = dict(backbone=dict(init_cfg=init_cfg, zero_init_attention=True))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, end=1, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=1)
