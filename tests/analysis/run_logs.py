"""Logs as mmengine writes them."""

import json


def train_record(step, loss, epoch=1):
    """Record of a training step."""
    return {"lr": 1e-3 / step, "loss": loss, "loss_cls": 0.6 * loss, "loss_bbox": 0.4 * loss} | {
        "epoch": epoch,
        "step": step,
    }


def val_record(epoch, ap50):
    """Record of a validation."""
    return {"coco/bbox_mAP": ap50 / 2, "coco/bbox_mAP_50": ap50, "coco/segm_mAP_50": ap50 - 0.1, "step": epoch}


def write_log(work_dir, stamp, records, tail=""):
    """Write the scalars of one start of a run; return their file."""
    path = work_dir / stamp / "vis_data/scalars.json"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path
