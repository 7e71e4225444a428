"""Hand-made ground truth and detections: objects on a 200 x 200 image, written as rows."""

from pycocotools.coco import COCO

from mrla_mm.analysis.coco_results import DetectionSet

CLASSES = ("cat", "dog")


def box_of(row):
    """Box as COCO writes it."""
    return [float(value) for value in row]


def detection_set(objects, detections, *, images=1, classes=CLASSES, crowds=()):
    """Return a DetectionSet.

    Args:
        objects: (image, class, (x, y, w, h)) each.
        detections: (image, class, (x, y, w, h), score) each.
        images: how many.
        classes: names; category ids are 11, 12, ...
        crowds: as objects.
    """
    truth = COCO()
    ids = {name: 11 + index for index, name in enumerate(classes)}
    annotations = []
    for crowd, rows in ((0, objects), (1, crowds)):
        for image, name, box in rows:
            x, y, w, h = box_of(box)
            annotation = dict(id=len(annotations) + 1, image_id=image, category_id=ids[name], bbox=[x, y, w, h])
            corners = [[x, y, x + w, y, x + w, y + h, x, y + h]]
            annotations.append(annotation | dict(area=w * h, iscrowd=crowd, segmentation=corners))
    truth.dataset = dict(
        images=[dict(id=image + 1, width=200, height=200, file_name=f"{image + 1}.png") for image in range(images)],
        annotations=annotations,
        categories=[dict(id=number, name=name) for name, number in ids.items()],
    )
    truth.createIndex()
    results = [
        dict(image_id=image, category_id=ids[name], bbox=box_of(box), score=score)
        for image, name, box, score in detections
    ]
    numbers = range(1, images + 1)
    return DetectionSet(truth, {"bbox": results}, tuple(numbers), tuple(ids.values()), tuple(classes))
