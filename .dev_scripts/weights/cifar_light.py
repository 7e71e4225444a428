"""MRLA-light's ImageNet recipe in small: a quarter of the width, CIFAR-10 at 64 x 64 pixels."""

_base_ = "mrla_mm::imagenet/resnet50_mrla_light_coslr_lbs_8xb32.py"
custom_imports = dict(imports=["mrla_mm", "weights_hooks"])
custom_hooks = [dict(type="ChannelsLast")]
data_root = "data/cifar10"
model = dict(
    backbone=dict(base_channels=16, stem_channels=16),
    head=dict(num_classes=10, in_channels=512, topk=(1,), loss=dict(num_classes=10)),
    data_preprocessor=dict(num_classes=10),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=64),
    dict(type="RandomCrop", crop_size=64, padding=8),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackInputs"),
]
test_pipeline = [*train_pipeline[:2], train_pipeline[-1]]
dataset = dict(_delete_=True, type="CustomDataset", data_root=data_root)
train_dataset = dict(data_prefix="train", pipeline=train_pipeline, **dataset)
test_dataset = dict(data_prefix="test", pipeline=test_pipeline, **dataset)
train_dataloader = dict(batch_size=128, num_workers=1, dataset=train_dataset)
test_dataloader = dict(batch_size=128, num_workers=1, dataset=test_dataset)
test_evaluator = dict(topk=(1,))
val_dataloader = val_evaluator = val_cfg = None
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, end=6, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=6)
default_hooks = dict(checkpoint=dict(save_best=None))
