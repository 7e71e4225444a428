"""The check of XML files in the format of Pascal VOC."""

import os
import xml.etree.ElementTree as ET
from collections import Counter

from mmengine.dataset import BaseDataset
from mmengine.fileio import list_from_file

from mrla_mm.datasets.file_checks import Findings, check_images, missing_names


def inspect_xml(dataset: BaseDataset) -> Findings:
    """Check the XML files of a data set, in which mmdet skips every name that is not a class."""
    names = Counter()
    images = []
    for name in list_from_file(dataset.ann_file):
        images.append(os.path.join(dataset.sub_data_root, dataset.img_subdir, f"{name}.jpg"))
        file = os.path.join(dataset.sub_data_root, dataset.ann_subdir, f"{name}.xml")
        try:
            objects = ET.parse(file).iterfind("object")
        except ET.ParseError as error:
            return Findings([f"{file} is not XML ({error}): write it anew, or take out {name!r}"])
        names.update(each.findtext("name") for each in objects)
    faults = check_images(images)
    classes = dataset.metainfo["classes"]
    found = [name for name in classes if name in names]
    rare = found and dataset.test_mode  # a small set may lack a class
    if len(found) < len(classes) and not rare and names.keys() - set(classes):
        faults.append(missing_names(classes, list(names)))
    return Findings(faults, sum(names[name] for name in found))
