# Plain EfficientNet-B1 on ImageNet-1K at 240 pixels: the baseline that the MRLA recipes are
# compared with.
_base_ = "../_base_/imagenet_efficientnet.py"
model = dict(backbone=dict(arch="b1"))
bicubic = dict(backend="pillow", interpolation="bicubic")
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="RandomResizedCrop", scale=240, **bicubic),
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
    dict(type="ResizeEdge", scale=272, edge="short", **bicubic),
    dict(type="CenterCrop", crop_size=240),
    dict(type="PackInputs"),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
