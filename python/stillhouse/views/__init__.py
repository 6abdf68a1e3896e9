"""Training examples of each method, made from a batch: what is masked, predicted and weighted, and the targets' noise.

::

    from stillhouse import views

    example = views.mdlm.mask(batch)                      # keyed: no generator, no state
    context, noise, target = example.triplet()            # (x^{−I}, ξ^I, x^I)

| module | method | makes |
|---|---|---|
| ``mdlm`` | MDLM | ``mask``; ``complementary``: two examples whose masks are complements |
| ``pgm`` | Partition Generative Modeling | ``partition``: groups, their weights, tokens sorted by group, attention |
| ``prime`` | MDM-Prime | ``mask`` of digits; ``filter_table``, ``valid_set``, ``idle_step_ratio`` |
| ``bd3lm`` | BD3-LM | ``mask`` with a time per block; ``block_attention`` |
| ``medusa`` | Medusa heads | ``targets``: the next k tokens |
| ``armd`` | ARMD | ``progressive``, ``strided``, ``masking_steps``, ``stored``: orders, blocks, causal masks |
| ``times`` | all | how t is drawn: ``Sampling`` |

The rows of a global batch become the same examples on any number of ranks, workers and devices, and others in every epoch: masks and orders are keyed by the
sequence, times by the place in the global batch. With ``sampling="sequence"`` a row becomes the same example in any batch.
"""

from . import armd, bd3lm, keyed, mdlm, medusa, pgm, prime, times
from ._compiled import keep_out_of_graphs
from .example import Example
from .keyed import ViewError
from .schedule import ARCCOS, LINEAR, Schedule

keep_out_of_graphs(armd, bd3lm, mdlm, medusa, pgm, prime)

__all__ = [
    "ARCCOS",
    "LINEAR",
    "Example",
    "Schedule",
    "ViewError",
    "armd",
    "bd3lm",
    "keyed",
    "mdlm",
    "medusa",
    "pgm",
    "prime",
    "times",
]
