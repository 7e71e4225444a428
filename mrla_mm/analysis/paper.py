"""What the paper states of its models' size and cost, beside what is counted for the configs of this package.

The figures are those of `mrla_mm.analysis.paper_rows`.
"""

from mrla_mm.analysis.complexity import Complexity
from mrla_mm.analysis.paper_rows import ROWS, PaperRow
from mrla_mm.analysis.paper_tables import table_of

NOTES = """\
"over plain" is the difference to the plain model above, which the choice of what else to count leaves alone.

* Base and MLA. The paper gives Mask R-CNN R50 + base +13.91 G over plain. By the rule above it is about a tenth of
  that: the depthwise convolutions are those of light (+1.01), the weighted sums over layers read t values at layer
  t, T (T + 1) / 2 in a stage of T layers (+0.28, or +0.56 if product and sum count apart: about +1.7 in all), and
  batch norm +0.11. Even MLA, which makes every value anew at every layer, stays near +3. No rule was looked for
  that gives the paper's figure; the same holds for its +0.5 B (base) and +0.7 B (MLA) on ResNet-50 at 224 x 224.
* Totals of detectors. The mask head's transposed convolution does 5.1 G multiply-adds; counted at each element of
  its output it would be 20.6 G, 15.4 G more, which is most of what the paper's totals exceed ours by.
* PVTv2. mmdet's PVTv2 with a 1000-class head has more parameters than the paper says; without the head B0 has 3.41 M.
"""


def compare(row: PaperRow, found: Complexity, plain: Complexity | None) -> dict[str, str]:
    """Line of the table: what was counted, the paper's figure, and the difference; for `as_markdown`.

    Args:
        row: the paper's.
        found: what was counted for its config.
        plain: what was counted for the plain model of the same row, or None for itself.
    """
    parameters = (found.trainable if row.is_detector else found.total_parameters) / 1e6
    operations = found.total / 1e9
    digits = 2 if row.is_detector else 1
    cells = {
        "table": table_of(row).number,
        "model": row.model,
        "M parameters": f"{parameters:.2f}",
        "paper's": "" if row.parameters is None else f"{row.parameters:.{digits}f}",
        "difference": "" if row.parameters is None else f"{parameters - row.parameters:+.2f}",
        "G multiply-adds": f"{operations:.3f}",
        "paper's FLOPs [G]": "" if row.operations is None else f"{row.operations:g}",
        "difference [G]": "" if row.operations is None else f"{operations - row.operations:+.2f}",
    }
    if plain is not None:
        cells["over plain [G]"] = f"{(found.total - plain.total) / 1e9:+.3f}"
        cells["paper's over plain"] = paper_difference(row)
    return cells


def plain_row(row: PaperRow) -> PaperRow | None:
    """Row of the plain model that a row's model adds layer attention to, or None for a plain model."""
    name, plus, _ = row.model.partition(" + ")
    return next(other for other in ROWS if other.model == name and other.shape == row.shape) if plus else None


def paper_difference(row: PaperRow) -> str:
    """What layer attention adds according to the paper, where it gives both figures."""
    plain = plain_row(row)
    if plain is None or row.operations is None or plain.operations is None:
        return ""
    return f"{row.operations - plain.operations:+.{2 if row.is_detector else 1}f}"
