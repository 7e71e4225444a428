# ImageNet-1K recipe of EfficientNet (App. B.1): 350 epochs of RMSProp on batches of 768, 0.97 of
# the rate every 2.4 epochs, AutoAugment, drop path and dropout of 0.2. The paper does not speak of
# the five epochs of warm-up and of the label smoothing; they are EfficientNet's. Optimizer (which
# needs the package timm), padding and eps are those of timm, with which the paper trains; padding
# and eps are those of the detectors that start from this too. Images are bicubic; timm draws
# bilinear or bicubic for each training image. Batch norms see 96 images here and 384 in the paper,
# which has two GPUs; on two, set train_dataloader.batch_size=384.
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
bicubic = dict(backend="pillow", interpolation="bicubic")
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomResizedCrop", scale=224, **bicubic),
    dict(type="RandomFlip", prob=0.5, direction="horizontal"),
    dict(
        type="AutoAugment",
        policies="imagenet",
        hparams=dict(pad_val=[104, 116, 124], interpolation="bicubic"),
    ),
    dict(type="PackInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="ResizeEdge", scale=256, edge="short", **bicubic),
    dict(type="CenterCrop", crop_size=224),
    dict(type="PackInputs"),
]
train_dataloader = dict(batch_size=96, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=96, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(
    optimizer=dict(
        _delete_=True,
        type="TimmRMSpropTF",
        lr=0.048,
        alpha=0.9,
        momentum=0.9,
        eps=1e-3,
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
