# ResNet-50 with MRLA-light in the setting of BA-Net: cosine schedule and label smoothing (App. B.1,
# "Other Relevant Networks"). The paper names these two and no others, so the rest is its own
# recipe.
_base_ = "./resnet50_mrla_light_8xb32.py"
model = dict(
    head=dict(
        loss=dict(_delete_=True, type="LabelSmoothLoss", label_smooth_val=0.1, loss_weight=1.0)
    )
)
param_scheduler = dict(
    _delete_=True, type="CosineAnnealingLR", T_max=100, by_epoch=True, begin=0, end=100
)
