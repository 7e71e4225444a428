# RTMDet-s with MRLA-light in the stages of its CSPNeXt, from random weights, so that no file on
# OpenMMLab's server is needed.
_base_ = "mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py"
custom_imports = dict(imports=["mrla_mm"], allow_failed_imports=False)
model = dict(
    backbone=dict(
        type="WithLayerAttention",
        backbone="CSPNeXt",
        stages="stage.*",
        init_cfg=None,
        zero_init_attention=False,
    )
)
custom_hooks = [
    *_base_.custom_hooks,
    dict(type="DatasetCheckHook"),
    dict(type="CheckpointCheckHook"),
]
default_hooks = dict(checkpoint=dict(type="AtomicCheckpointHook"))
