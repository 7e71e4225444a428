"""Recorded similarities are those of the queries that the layers used."""

import pytest
import torch

from mrla_mm.analysis.query_similarity import QueryRecorder
from mrla_mm.errors import InputError
from mrla_mm.ops import global_average
from tests.analysis.small_models import resnet, vit


@pytest.fixture
def pictures():
    return torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def record(model, pictures):
    with torch.no_grad(), QueryRecorder(model) as recorder:
        for picture in pictures.split(1):
            model(picture)
    return recorder


@pytest.mark.parametrize("variant", ["MRLALight", "MRLABase", "LinearRLA", "MLA"])
@pytest.mark.parametrize(("build", "depth"), [(resnet, 2), (vit, 3)])
def test_similarities_are_those_of_the_queries(build, depth, variant, pictures):
    model, queries = build(variant), []
    with torch.no_grad(), QueryRecorder(model) as recorder:
        for branch in recorder.branches.values():

            def keep(attention, args, out):
                queries.append(attention.project_query(global_average(args[0])))

            recorder.callback(branch.attention.register_forward_hook(keep).remove)
        model(pictures)
    for stage, start in zip(record(model, pictures).stages(), (0, depth), strict=True):
        assert stage.first == 2 and len(stage.layers) == depth - 1
        for index in range(1, depth):
            last, this = queries[start + index - 1], queries[start + index]
            cosine = (last * this).sum(-1) / (last.norm(dim=-1) * this.norm(dim=-1))
            torch.testing.assert_close(stage.values[:, index - 1], cosine.abs().float())
        assert stage.values.std() > 0.01, "queries that are all alike would prove nothing"
    assert not any(module._forward_hooks for module in model.modules())


def test_pairs_with_the_first_layer_can_be_left_out(pictures):
    recorder = record(vit("MRLABase"), pictures)
    for whole, part in zip(recorder.stages(), recorder.stages(skip_first=True), strict=True):
        assert part.layers == whole.layers[1:] and part.first == 3
        assert part.values.equal(whole.values[:, 1:])
    with pytest.raises(InputError, match="3 layers"):
        record(resnet("MRLABase"), pictures).stages(skip_first=True)
