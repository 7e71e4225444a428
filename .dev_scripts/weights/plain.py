"""The detector of ../bccd, fine-tuned from plain weights as the COCO configs do it."""

_base_ = "../bccd/mrla_light.py"
folder = "work_dirs/weights/cifar"
plain = f"{folder}/cifar_plain/seed_0/epoch_6.pth"
model = dict(
    backbone=dict(
        layer_attention=None,
        zero_init_attention=True,
        frozen_stages=1,
        norm_eval=True,
        init_cfg=dict(_delete_=True, type="Pretrained", checkpoint=plain),
    )
)
