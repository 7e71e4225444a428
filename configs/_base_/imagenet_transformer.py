# ImageNet-1K recipe of DeiT, CeiT and PVTv2 (App. B.1, as in DeiT): 300 epochs of AdamW from 1e-3
# on batches of 1024, weight decay 0.05, five epochs of warm-up, cosine decay. Crops, RandAugment
# and erasing are those of mmpretrain. CeiT's batch norms see 128 images here and 256 in the paper,
# which has four GPUs; on four, set train_dataloader.batch_size=256.
_base_ = [
    "mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py",
    "mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py",
    "mmpretrain::_base_/default_runtime.py",
    "./mrla_mm.py",
]
data_root = "data/imagenet"
model = dict(
    type="ImageClassifier",
    head=dict(
        type="VisionTransformerClsHead",
        num_classes=1000,
        init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02),  # its default starts at 0
        loss=dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
    ),
    init_cfg=[
        dict(type="TruncNormal", layer="Linear", std=0.02),
        dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
    ],
    # One of the two for each batch; DeiT's 0.8 and 1.0 are the parameters of their beta
    # distributions.
    train_cfg=dict(augments=[dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]),
)
train_dataloader = dict(
    batch_size=128, sampler=dict(_delete_=True, type="RepeatAugSampler", num_repeats=3)
)
val_dataloader = dict(batch_size=128)
test_dataloader = val_dataloader
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={"cls_token": dict(decay_mult=0.0), "pos_embed": dict(decay_mult=0.0)}
    )
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
    dict(type="CosineAnnealingLR", eta_min_ratio=1e-2, by_epoch=True, begin=5, end=300),
]
auto_scale_lr = dict(enable=True)  # base_batch_size is 1024; fewer images take a smaller step
default_hooks = dict(
    checkpoint=dict(type="AtomicCheckpointHook", max_keep_ckpts=3, save_best="auto")
)
