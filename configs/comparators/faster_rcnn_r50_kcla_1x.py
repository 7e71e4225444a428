# Faster R-CNN on ResNet-50 with KCLA, 1x schedule.
# The branches do not start as identities: better start from ImageNet weights with KCLA.
_base_ = "../faster_rcnn_r50_1x.py"
model = dict(
    backbone=dict(
        type="MRLAResNet", layer_attention=dict(type="mrla_mm.KCLA"), zero_init_attention=False
    )
)
