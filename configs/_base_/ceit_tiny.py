# CeiT-T as the backbone of a detector with a simple feature pyramid. CeiT's weights are published
# nowhere they could be fetched from: pre-train with configs/imagenet/ceit_tiny_8xb128.py first.
ceit_tiny = dict(
    type="CeiT",
    arch="ceit-tiny",
    img_size=224,
    out_type="featmap",
    drop_path_rate=0.1,
    norm_eval=True,
    init_cfg=dict(
        type="Pretrained", checkpoint="work_dirs/ceit_tiny_8xb128/epoch_300.pth", prefix="backbone."
    ),
)
