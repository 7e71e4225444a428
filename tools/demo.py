#!/usr/bin/env python
"""Detect objects in pictures: `python tools/demo.py INPUT CONFIG CHECKPOINT`, INPUT an image or a folder of images.

Writes each picture with its boxes, masks, class names and scores, and predictions.json with all of them as numbers.
"""

import argparse
import json
import sys
from collections import Counter

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import cv2
import mmcv
from mmdet.apis import inference_detector
from mmdet.registry import DATASETS
from pycocotools import mask as coco_mask

from mrla_mm import cli
from mrla_mm.analysis.gallery import draw_detections
from mrla_mm.datasets.images import fault_of
from mrla_mm.errors import InputError
from mrla_mm.outputs import make_folder, spare_inputs
from mrla_mm.trained import load_weights, usable_device


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description="Detect objects in an image or a folder of images.")
    parser.add_argument("input", help="image file, or folder of images")
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("checkpoint", help="checkpoint file")
    parser.add_argument(
        "--out-dir", default="work_dirs/demo", help="folder for pictures and predictions.json (default: %(default)s)"
    )
    parser.add_argument(
        "--score-thr", type=float, default=0.3, help="leave out detections that score lower (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    return parser.parse_args(argv)


def read_image(path):
    """Return an image (H, W, 3) in BGR, whatever the file's channels, turned as its EXIF orientation says.

    Raises:
        InputError: it is no image, or cut off; decoders fill up what is missing and say nothing.
    """
    fault = fault_of(str(path))
    try:
        image = None if fault else mmcv.imread(str(path))
    except cv2.error as error:
        raise InputError(f"{path} (no image that OpenCV reads)") from error
    if image is None:
        raise InputError(f"{path} ({fault or 'no image that OpenCV reads'})")
    return image


def detect(model, image, path):
    """Return the detections of an image.

    Raises:
        InputError: it is so narrow that resizing would leave nothing of a side.
    """
    try:
        return inference_detector(model, image).pred_instances.cpu()
    except cv2.error as error:
        raise InputError(f"{path} ({image.shape[1]} x {image.shape[0]} pixels are too narrow to resize)") from error


def load_detector(config, checkpoint, *, device):
    """Return the detector with its weights.

    Raises:
        InputError: config or checkpoint is missing or broken, or the checkpoint is of another model than the config.
    """
    device = usable_device(device)
    cfg = cli.read_config(config, {})
    if cfg.get("default_scope", "mmdet") != "mmdet":
        raise InputError(f"config {config} is no detector's (default_scope={cfg.default_scope!r}): give one of mmdet's")
    model, _, meta = load_weights(cfg, config, checkpoint, device=device)
    model.cfg, model.dataset_meta = cfg, dataset_meta(cfg, meta)  # where mmdet's inference and drawing look for them
    return model


def nothing_found(best, threshold):
    """Return why there are no detections: how near the best one came to the threshold."""
    if best is None:
        return " (none passes the score_thr of the config's model.test_cfg either)"
    return f" (the best scores {best:.3g}, --score-thr is {threshold:g})"


def dataset_meta(cfg, meta):
    """Return names and colours of the classes: those of the training, in the colours of the config's data set if any.

    So does mmdet's `init_detector`, but for a checkpoint without names, whose classes it takes for COCO's.
    """
    named = {"classes": meta["CLASSES"]} if "CLASSES" in meta else {}  # of mmdet 2.x
    trained = {key.lower(): value for key, value in (meta.get("dataset_meta") or named).items()}
    own = DATASETS.build({**cfg.test_dataloader.dataset, "lazy_init": True}).metainfo
    palette = own.get("palette") or trained.get("palette") or "random"
    return {**own, **trained, "palette": palette}


def as_records(instances, classes):
    """Return detections as plain numbers: boxes [x1, y1, x2, y2] in pixels, masks as compressed COCO RLE."""
    records = []
    for index in range(len(instances)):
        label = int(instances.labels[index])
        record = {
            "label": label,
            "class": classes[label],
            "score": round(float(instances.scores[index]), 4),
            "bbox": [round(value, 2) for value in instances.bboxes[index].tolist()],
        }
        if "masks" in instances:
            rle = coco_mask.encode(instances.masks[index].numpy().astype("uint8", order="F"))
            record["mask"] = {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode()}
        records.append(record)
    return records


def main(argv=None):
    """Run the detector over the input."""
    args = parse_args(argv)
    if not 0 <= args.score_thr <= 1:
        raise InputError(f"--score-thr {args.score_thr}: give a number from 0 to 1")
    images = cli.find_images(args.input)
    out_dir = make_folder(args.out_dir)
    spare_inputs(images, [out_dir / "predictions.json"])  # a picture of `dog.png` is called `dog.png` too
    model = load_detector(args.config, args.checkpoint, device=args.device)
    stems = Counter(path.stem for path in images)
    results, unreadable = [], []
    for number, path in enumerate(images, 1):
        try:
            image = read_image(path)
            instances = detect(model, image, path)
        except InputError as error:
            unreadable.append(str(error))
            continue
        best = max(instances.scores.tolist(), default=None)
        instances = instances[instances.scores >= args.score_thr]
        picture = draw_detections(image[..., ::-1], instances, meta=model.dataset_meta, score_thr=args.score_thr)
        name = path.stem if stems[path.stem] == 1 else path.name  # dog.jpg and dog.png are two pictures
        mmcv.imwrite(picture[..., ::-1], str(out_dir / f"{name}.png"))
        height, width = image.shape[:2]
        detections = as_records(instances, model.dataset_meta["classes"])
        results.append({"image": path.name, "width": width, "height": height, "detections": detections})
        note = "" if detections else nothing_found(best, args.score_thr)
        print(f"[{number}/{len(images)}] {path.name}: {len(detections)} detections{note}", flush=True)
    if results:
        (out_dir / "predictions.json").write_text(json.dumps(results, indent=1))
    if unreadable:
        kept = f"; pictures and predictions.json of the others are in {out_dir}" if results else ""
        raise InputError(f"{len(unreadable)} of {len(images)} images cannot be read: {', '.join(unreadable)}{kept}")
    print(f"pictures and predictions.json are in {out_dir}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
