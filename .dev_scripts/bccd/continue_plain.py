"""A trained plain detector, trained on for five epochs; give its file as `load_from`."""

_base_ = "./plain.py"
load_from = "work_dirs/bccd/plain/seed_0/epoch_10.pth"
train_cfg = dict(max_epochs=5)
optim_wrapper = dict(optimizer=dict(lr=5e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, end=5, convert_to_iter_based=True),
]
