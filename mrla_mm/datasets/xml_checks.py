"""The check of XML files in the format of Pascal VOC."""

import os
import xml.etree.ElementTree as ET
from collections import Counter

from mmengine.dataset import BaseDataset
from mmengine.fileio import list_from_file

from mrla_mm.datasets.file_checks import TOLERATED, Findings, missing_names


def inspect_xml(dataset: BaseDataset) -> Findings:
    """Check the XML files of a data set, in which mmdet skips every name that is not a class."""
    classes = dataset.metainfo["classes"]
    names = Counter()
    boxes = []  # the shorter side and the file of each
    for name in list_from_file(dataset.ann_file):
        file = os.path.join(dataset.sub_data_root, dataset.ann_subdir, f"{name}.xml")
        try:
            objects = ET.parse(file).findall("object")
        except ET.ParseError as error:
            return Findings([f"{file} is not XML ({error}): save it again, or take out {name!r}"])
        names.update(each.findtext("name") for each in objects)
        wanted = [each for each in objects if each.findtext("name") in classes]
        boxes += [(shorter_side(each), file) for each in wanted]
    faults = []
    found = [name for name in classes if name in names]
    may_lack_classes = found and dataset.test_mode  # since it is small
    if len(found) < len(classes) and not may_lack_classes and names.keys() - set(classes):
        faults.append(missing_names(classes, list(names)))
    shortest, file = min(boxes, default=(1, ""))
    empty = sum(side < 1 for side, _ in boxes)
    if shortest < 0 or empty > TOLERATED * len(boxes):
        told = f"{empty} of {len(boxes)} objects have no bndbox of xmin < xmax and ymin < ymax"
        faults.append(f"{told} in pixels, one is in {file}: repair them")
    min_side = (dataset.filter_cfg or {}).get("bbox_min_size") or 1
    return Findings(faults, None if faults else sum(side >= min_side for side, _ in boxes))


def shorter_side(element: ET.Element) -> int:
    """Return the shorter side of an object's box in the whole pixels of mmdet, -1 without a box."""
    corners = [element.findtext(f"bndbox/{key}") for key in ("xmin", "ymin", "xmax", "ymax")]
    try:
        left, top, right, bottom = [int(float(text)) for text in corners]
    except (OverflowError, TypeError, ValueError):
        return -1
    return min(right - left, bottom - top)
