"""Recorded similarities are those of the queries that the layers used."""

import csv

import cv2
import pytest
import torch
from torch import nn

from mrla_mm.analysis import query_similarity
from mrla_mm.analysis.query_similarity import QueryRecorder
from mrla_mm.attention import LayerAttention
from mrla_mm.errors import InputError
from tests.analysis.small_models import resnet, vit


@pytest.fixture
def pictures():
    return torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def used_queries(model, pictures):
    """Queries (B, G, D) of the layers in their order, from what went into their attention."""
    queries, handles = [], []
    for module in model.modules():
        if isinstance(module, LayerAttention):
            keep = lambda module, args, result: queries.append(module.query_and_key(args[0])[0])  # noqa: E731
            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(pictures)
    for handle in handles:
        handle.remove()
    return queries


@pytest.mark.parametrize(
    ("build", "variant", "depths"),
    [
        (resnet, "MRLABase", (2, 2)),
        (vit, "MRLABase", (3, 3)),
        (vit, "MRLALight", (3, 3)),
        (resnet, "LinearRLA", (2, 2)),
    ],
)
def test_similarities_are_those_of_the_queries(build, variant, depths, pictures):
    model = build(variant)
    queries = used_queries(model, pictures)
    with torch.no_grad(), QueryRecorder(model) as recorder:
        for picture in pictures.split(1):
            model(picture)
    start = 0
    for stage, depth in zip(recorder.stages(), depths, strict=True):
        assert stage.firsts == 2 and len(stage.layers) == depth - 1
        for index in range(1, depth):
            last, this = queries[start + index - 1], queries[start + index]
            cosine = (last * this).sum(-1) / (last.norm(dim=-1) * this.norm(dim=-1))
            torch.testing.assert_close(stage.values[:, index - 1], cosine.abs().float())
        assert stage.values.std() > 0.01, "queries that are all alike would prove nothing"
        start += depth
    assert not any(module._forward_hooks for module in model.modules())


def test_pairs_with_the_first_layer_can_be_left_out(pictures):
    model = vit("MRLABase")
    with torch.no_grad(), QueryRecorder(model) as recorder:
        model(pictures)
    for whole, part in zip(recorder.stages(), recorder.stages(skip_first=True), strict=True):
        assert part.layers == whole.layers[1:] and part.firsts == 3
        assert part.values.equal(whole.values[:, 1:])
    shallow = resnet("MRLABase")
    with torch.no_grad(), QueryRecorder(shallow) as recorder:
        shallow(pictures)
    with pytest.raises(InputError, match="no stage of the model has 3 layers"):
        recorder.stages(skip_first=True)


def test_models_without_queries_are_refused():
    with pytest.raises(InputError, match="Conv2d has no layer attention"):
        QueryRecorder(nn.Conv2d(3, 3, 1))
    with pytest.raises(InputError, match=r"layer1\.0\.mrla has no queries"):
        QueryRecorder(resnet("MRLALight", gated=False, previous="none"))


def test_picture_and_table(tmp_path, pictures):
    found = []
    for name, model in (("one", vit("MRLABase")), ("two", vit("MRLALight"))):
        with torch.no_grad(), QueryRecorder(model) as recorder:
            model(pictures)
        found.append((name, recorder.stages()))
    picture = cv2.imread(str(query_similarity.plot_histograms(found, tmp_path / "new/histograms.png")))
    for colour in ((180, 119, 31), (14, 127, 255)):  # of each model's bars, blended with white
        blended = [round(0.8 * part + 0.2 * 255) for part in colour]
        assert (abs(picture.astype(int) - blended).max(-1) < 6).sum() > 200
    rows = list(csv.DictReader(query_similarity.write_csv(found, tmp_path / "similarities.csv").open()))
    assert len(rows) == 2 * 2 * 2 * 2  # models, stages, layers, heads
    row, values = rows[-1], found[1][1][1].values[:, 1, 1]
    assert (row["model"], row["stage"], row["layer"], row["head"], row["images"]) == ("two", "2", "3", "2", "3")
    assert [float(row[key]) for key in ("mean", "min", "max")] == pytest.approx(
        [float(values.mean()), float(values.min()), float(values.max())], rel=1e-4
    )
