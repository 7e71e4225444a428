# ImageNet-1K recipe of EfficientNet (App. B.1): 350 epochs of RMSProp on batches of 768, 0.97 of
# the rate every 2.4 epochs, AutoAugment, drop path and dropout of 0.2. The paper does not speak of
# the five epochs of warm-up and of the label smoothing; they are EfficientNet's. Padding and eps
# are those of timm, with which the paper trains, and of the detectors that start from this.
_base_ = [
    "mmpretrain::_base_/models/efficientnet_b0.py",
    "mmpretrain::_base_/datasets/imagenet_bs64_autoaug.py",
    "mmpretrain::_base_/schedules/imagenet_bs256.py",
    "mmpretrain::_base_/default_runtime.py",
    "./mrla_mm.py",
]
data_root = "data/imagenet"
model = dict(
    backbone=dict(
        drop_path_rate=0.2,
        conv_cfg=dict(type="Conv2d"),
        norm_cfg=dict(type="BN", eps=1e-5, momentum=0.01),
    ),
    neck=dict(type="DroppedAveragePooling", drop_rate=0.2),
    head=dict(
        loss=dict(_delete_=True, type="LabelSmoothLoss", label_smooth_val=0.1, mode="original")
    ),
)
train_dataloader = dict(batch_size=96)
val_dataloader = dict(batch_size=96)
test_dataloader = val_dataloader
optim_wrapper = dict(
    optimizer=dict(
        _delete_=True,
        type="RMSprop",
        lr=0.048,
        alpha=0.9,
        momentum=0.9,
        eps=0.0316,  # TensorFlow adds its 0.001 inside the square root, PyTorch behind it
        weight_decay=4e-5,
    ),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0),
)
param_scheduler = [
    dict(
        type="LinearLR",
        start_factor=1e-3,
        by_epoch=True,
        begin=0,
        end=5,
        convert_to_iter_based=True,
    ),
    dict(
        type="MultiStepLR",
        by_epoch=True,
        gamma=0.97,
        milestones=[-(-12 * step // 5) for step in range(1, 146)],
    ),
]
train_cfg = dict(by_epoch=True, max_epochs=350, val_interval=1)
auto_scale_lr = dict(enable=True, base_batch_size=768)
default_hooks = dict(
    checkpoint=dict(type="AtomicCheckpointHook", max_keep_ckpts=3, save_best="auto")
)
