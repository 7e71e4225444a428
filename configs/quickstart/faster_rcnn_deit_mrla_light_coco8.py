# Faster R-CNN on a narrow vision transformer with MRLA-light and a simple feature pyramid, from scratch on eight COCO
# images at reduced size: a detector that is wired right learns them by heart.
_base_ = "./faster_rcnn_r18_mrla_light_coco8.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="MRLAViT",
        arch=dict(embed_dims=192, num_layers=8, num_heads=3, feedforward_channels=768),
        img_size=(192, 256),
        patch_size=16,
        out_type="featmap",
        layer_attention=dict(type="MRLALight", head_channels=16),
        zero_init_attention=False,
    ),
    neck=dict(_delete_=True, type="SimpleFeaturePyramid", in_channels=192, out_channels=128),
)
