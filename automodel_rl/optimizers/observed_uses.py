"""Uses of a plain model's parameters, observed while it runs. `verify` derives weight decay and matrices from them,
independently of optimizers/roles.py, which goes by modules.

Every tensor operation is observed. Views share a parameter's storage, and casts are followed. A product marks its
result, and other operations pass the marks on until the next product. This shows which parameter produced the scores
that a top-k selects from (a router), and which one the logits (the head).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.compat.operations import CAST, OperationWatch

_ATEN = torch.ops.aten
PRODUCTS = {_ATEN.mm: (0, 1), _ATEN.addmm: (1, 2), _ATEN.bmm: (0, 1), _ATEN.baddbmm: (1, 2)}
"""Matrix products, with the indices of their factors."""

OTHER_WEIGHTS = {_ATEN.embedding: 0, _ATEN.index: 0, _ATEN.grid_sampler_2d: 0, _ATEN.convolution: 1}
"""Other operations with a weight, and its index."""

CHOICES = (_ATEN.topk, _ATEN.sort)
COPIES = (CAST, _ATEN.clone)


@dataclass
class Uses:
    """Parameters by use.

    Attributes:
        transposed: factors stored as [inputs, outputs].
        vectors: factors with a single output.
        looked_up: embeddings and convolution weights.
        choosers: those whose products are compared with each other to choose some.
        head: those whose products are the logits.
    """

    factors: set[nn.Parameter] = field(default_factory=set)
    transposed: set[nn.Parameter] = field(default_factory=set)
    vectors: set[nn.Parameter] = field(default_factory=set)
    looked_up: set[nn.Parameter] = field(default_factory=set)
    choosers: set[nn.Parameter] = field(default_factory=set)
    head: set[nn.Parameter] = field(default_factory=set)

    @property
    def decayed(self) -> set[nn.Parameter]:
        """Parameters with weight decay. All others are added or multiplied elementwise."""
        return self.factors | self.looked_up

    @property
    def matrices(self) -> set[nn.Parameter]:
        """Parameters that Muon trains."""
        return self.factors - self.vectors - self.looked_up - self.choosers - self.head


def observed_uses(model: nn.Module, run: Callable[[], list[Tensor]]) -> Uses:
    """Observes a model. `run` computes its forward on examples that use every parameter, and returns the logits."""
    watch = _UseWatch(model)
    with torch.no_grad(), watch:
        logits = run()
    for tensor in logits:
        watch.uses.head |= watch.makers_of(tensor)
    return watch.uses


class _UseWatch(OperationWatch):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.uses = Uses()
        self._parameter_at = {_place(parameter): parameter for parameter in model.parameters()}
        self._makers: dict[int, set[nn.Parameter]] = {}
        self._kept: list[Tensor] = []  # so that no storage is reused

    def makers_of(self, tensor: Tensor) -> set[nn.Parameter]:
        """Returns the parameters whose products a tensor derives from."""
        return self._makers.get(_place(tensor), set())

    def see(self, operation: Any, arguments: tuple[Any, ...], given: list[Tensor], made: list[Tensor]) -> None:
        self._kept += made
        if operation in OTHER_WEIGHTS:
            found = self._parameters(arguments[OTHER_WEIGHTS[operation]])
            self.uses.looked_up |= {parameter for parameter in found if parameter.ndim > 1}  # rows, not single numbers
            makers: set[nn.Parameter] = set()
        elif operation in PRODUCTS:
            makers = set().union(*(self._as_factor(arguments[place], made[0]) for place in PRODUCTS[operation]))
        else:
            makers = set().union(*map(self.makers_of, given))
        if operation in CHOICES:
            self.uses.choosers |= makers
        if operation in COPIES and self._parameters(given[0]):
            self._parameter_at[_place(made[0])] = self._parameter_at[_place(given[0])]
        for tensor in made:
            self._makers[_place(tensor)] = self.makers_of(tensor) | makers

    def _parameters(self, tensor: Tensor) -> set[nn.Parameter]:
        parameter = self._parameter_at.get(_place(tensor))
        return set() if parameter is None else {parameter}

    def _as_factor(self, factor: Tensor, product: Tensor) -> set[nn.Parameter]:
        found = self._parameters(factor)
        self.uses.factors |= found
        if factor.stride(-1) == 1 and factor.stride(-2) != 1:  # not transposed for the product
            self.uses.transposed |= found
        if product.shape[-1] == 1:
            self.uses.vectors |= found
        return found


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
