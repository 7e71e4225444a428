# RetinaNet on a plain DeiT-Base with a simple feature pyramid, 1x schedule: the baseline of the
# MRLA configs.
_base_ = "./retinanet_deit_t_1x.py"
model = dict(
    backbone=dict(
        arch="deit-base",
        init_cfg=dict(
            checkpoint="https://dl.fbaipublicfiles.com/deit/deit_base_patch16_224-b5f2ef4d.pth"
        ),
    ),
    neck=dict(in_channels=768),
)
