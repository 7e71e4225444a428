#!/usr/bin/env python
"""Detect objects in pictures: `python tools/demo.py INPUT CONFIG CHECKPOINT`, INPUT an image or a folder of images.

Writes each picture with its boxes, masks, class names and scores, and predictions.json with all of them as numbers.
"""

import argparse
import json
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import mmcv
from mmdet.apis import inference_detector
from mmdet.registry import DATASETS
from pycocotools import mask as coco_mask

from mrla_mm import cli
from mrla_mm.analysis.gallery import draw_detections
from mrla_mm.errors import InputError
from mrla_mm.inference import chosen_images, load_model, paths_by_name


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description="Detect objects in an image or a folder of images.")
    parser.add_argument("input", help="image file, or folder of images")
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("checkpoint", help="checkpoint file")
    parser.add_argument(
        "--out-dir", type=Path, default=Path("work_dirs/demo"), help="folder for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--score-thr", type=float, default=0.3, help="leave out detections that score lower (default: %(default)s)"
    )
    parser.add_argument("--max-images", type=int, help="take at most so many images of a folder")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    return parser.parse_args(argv)


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
    images = chosen_images(args)
    model, cfg, meta = load_model(args.config, args.checkpoint, device=args.device)
    model.cfg, model.dataset_meta = cfg, dataset_meta(cfg, meta)  # where mmdet's inference and drawing look for them
    results = []
    for path, out_file in paths_by_name(images, args.out_dir).items():
        image = mmcv.imread(str(path))
        if image is None:
            raise InputError(f"image {path} cannot be read")
        instances = inference_detector(model, image).pred_instances.cpu()
        best = max(instances.scores.tolist(), default=0.0)
        instances = instances[instances.scores >= args.score_thr]
        picture = draw_detections(image[..., ::-1], instances, meta=model.dataset_meta, score_thr=args.score_thr)
        mmcv.imwrite(picture[..., ::-1], str(out_file))
        height, width = image.shape[:2]
        detections = as_records(instances, model.dataset_meta["classes"])
        results.append({"image": path.name, "width": width, "height": height, "detections": detections})
        print(f"[{len(results)}/{len(images)}] {path.name}: {len(detections)} detections, best score {best:.3g}")
    (args.out_dir / "predictions.json").write_text(json.dumps(results, indent=1))
    print(f"pictures and predictions.json are in {args.out_dir}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
