"""Write docs/tables/configs.csv: what training a detector costs, by config.

Parameters, multiply-adds of an image of 1280 x 800, and MiB that the forward pass of one image of
1333 x 800, padded to 1344, with ten objects saves for backward, with and without checkpointed
blocks.
"""

import csv
from pathlib import Path

import torch
from mmengine.runner import set_random_seed

from measure import saved_bytes
from mrla_mm.analysis.complexity import measure
from mrla_mm.config import read_config
from mrla_mm.inference import build_model

RESNETS = ("r50", "r101", "r152")
EFFICIENTNETS = ("b0", "b1")
TRANSFORMERS = ("pvtv2_b0", "pvtv2_b1", "ceit_t", "ceit_s", "deit_t", "deit_s", "deit_b")
MODELS = [
    "retinanet_r50",
    "faster_rcnn_r50",
    *(f"mask_rcnn_{size}" for size in RESNETS),
    *(f"efficientnet/mask_rcnn_efficientnet_{size}" for size in EFFICIENTNETS),
    *(f"transformers/mask_rcnn_{size}" for size in TRANSFORMERS),
]
VARIANTS = ("1x", "mrla_light_1x", "mrla_base_1x")
ANYWHERE = [
    "mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py",
    "mrla_mm::anywhere/mask_rcnn_swin_t_mrla_light_1x.py",
    "mmdet::rtmdet/rtmdet_s_8xb32-300e_coco.py",
    "mrla_mm::anywhere/rtmdet_s_mrla_light_300e.py",
]


def chosen_configs() -> list[str]:
    """Return the configs of the table."""
    names = [f"{model}_{variant}.py" for model in MODELS for variant in VARIANTS]
    names = [f"mrla_mm::{name}" for name in names if Path("configs", name).is_file()]
    return names + ANYWHERE


def saved_mib(name: str, options: dict) -> float:
    """Return what the forward pass of an image saves for backward, in MiB."""
    from mmdet.testing import demo_mm_inputs  # after mrla_mm, whose operators it needs

    set_random_seed(0)
    cfg = read_config(name, {"model.backbone.init_cfg": None} | options)
    model = build_model(cfg).train()
    objects = dict(num_items=[10], num_classes=80, with_mask="mask" in name)
    image = demo_mm_inputs(1, [[3, 800, 1344]], **objects)
    image = model.data_preprocessor(image, True)
    return saved_bytes(lambda: model(**image, mode="loss"), model) / 2**20


def main() -> None:
    """Count all configs; print each row as it is known."""
    out = Path("docs/tables/configs.csv")
    with out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = "parameters (M)", "multiply-adds (G)", "saved (MiB)", "with_cp (MiB)"
        writer.writerow(["config", *columns])
        for name in chosen_configs():
            model = build_model(read_config(name, {}))
            cost = measure(model, (800, 1280), device="meta")
            row = [f"{sum(cost.parameters.values()) / 1e6:.2f}", f"{cost.total / 1e9:.1f}"]
            row += [f"{saved_mib(name, {}):.0f}"]
            if "rtmdet" in name:  # CSPNeXt has no checkpointed blocks
                row += [""]
            else:
                row += [f"{saved_mib(name, {'model.backbone.with_cp': True}):.0f}"]
            writer.writerow([name.partition("::")[2].removesuffix(".py"), *row])
            file.flush()
            print(name, *row, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
