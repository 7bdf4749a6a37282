"""From a draft configuration to the plan its trees grow by."""

from services.speculation.growth import DynamicPlan, Plan, StaticPlan
from services.types.configuration import DraftConfig, TreeShape

EAGLE_1_TREE: tuple[tuple[int, ...], ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The fixed tree of EAGLE-1 (arXiv 2401.15077) as paths of child ranks: 25 draft nodes, depth 5."""


def plan_for(config: DraftConfig) -> Plan:
    """The plan of a configuration's shape."""
    match config.shape:
        case TreeShape.DYNAMIC:
            return DynamicPlan(config.levels, config.beam)
        case TreeShape.STATIC:
            return StaticPlan(EAGLE_1_TREE)
        case TreeShape.CHAIN:
            return StaticPlan([(0,) * depth for depth in range(1, config.levels + 1)])
