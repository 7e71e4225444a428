# ResNet-50 with MRLA-light on ImageNet-1K in BA-Net's recipe (Table 6).
_base_ = ["./resnet50_mrla_light_8xb32.py", "../_base_/banet_recipe.py"]
model = dict(head=dict(loss=_base_.banet_loss))
param_scheduler = _base_.banet_scheduler
