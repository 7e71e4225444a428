# BA-Net's recipe for ResNets, which Table 6 has beside the paper's own: cosine schedule and label
# smoothing (App. B.1, "Other Relevant Networks"). The paper names these two and no others, so the
# rest stays. Its code also warms up for five epochs.
banet_loss = dict(_delete_=True, type="LabelSmoothLoss", label_smooth_val=0.1, loss_weight=1.0)
banet_scheduler = dict(
    _delete_=True, type="CosineAnnealingLR", T_max=100, by_epoch=True, begin=0, end=100
)
