"""The other attention modules of the paper's tables and after it, in the same code and recipe."""

from mrla_mm.comparators.channel import BA, CBAM, ECA, SE
from mrla_mm.comparators.dia import DIA
from mrla_mm.comparators.dla import DLALight
from mrla_mm.comparators.kcla import KCLA
from mrla_mm.comparators.resnet import ComparatorResNet
from mrla_mm.comparators.rla import RLAResNet
from mrla_mm.comparators.spatial import A2, AA
