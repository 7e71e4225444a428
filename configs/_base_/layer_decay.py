# AdamW for a detector on a pretrained transformer: each block learns at 0.75 of the rate of the one
# behind it. What has one dimension, or is a token or a position, does not decay.
layer_decay = dict(
    _delete_=True,
    type="OptimWrapper",
    constructor="LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        layer_decay_rate=0.75,
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={
            "cls_token": dict(decay_mult=0.0),
            "dist_token": dict(decay_mult=0.0),
            "pos_embed": dict(decay_mult=0.0),
        },
    ),
)
