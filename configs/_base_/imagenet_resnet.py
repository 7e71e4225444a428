# ImageNet-1K recipe of ResNet (App. B.1): random crops of 224 and flips, 100 epochs of SGD from 0.1
# on batches of 256, weight decay 1e-4, a tenth of the step every 30 epochs. All that is
# mmpretrain's config; below is what differs. Batch norms see 32 images here and 64 in the paper,
# which has four GPUs; on four, set train_dataloader.batch_size=64.
_base_ = ["mmpretrain::resnet/resnet50_8xb32_in1k.py", "./mrla_mm.py"]
data_root = "data/imagenet"
# As in torchvision's ResNet, whose figures the paper compares with; the paper's code has True.
model = dict(backbone=dict(zero_init_residual=False))
auto_scale_lr = dict(enable=True)  # base_batch_size is 256; fewer images take a smaller step
default_hooks = dict(
    checkpoint=dict(type="AtomicCheckpointHook", max_keep_ckpts=3, save_best="auto")
)
