# What every experiment of this package adds to its host's config.
custom_imports = dict(imports=["mrla_mm"], allow_failed_imports=False)
custom_hooks = [
    dict(type="DatasetCheckHook"),
    dict(type="CheckpointCheckHook"),
    dict(type="mmdet.CheckInvalidLossHook", interval=1),
]
