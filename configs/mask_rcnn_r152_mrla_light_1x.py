# Mask R-CNN on ResNet-152 with MRLA-light, 1x schedule.
_base_ = "./mask_rcnn_r101_mrla_light_1x.py"
model = dict(backbone=dict(depth=152, init_cfg=dict(checkpoint="torchvision://resnet152")))
