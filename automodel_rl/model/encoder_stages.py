"""Pipeline stages of an encoder: each rank keeps some of its layers, and has stand-ins for everything else.

transformers' own forward runs on every stage. A stage replaces the layers of other stages by layers that pass their
input on, and other modules of other stages by modules that give zeros of the right shape. After its last layer a stage
sends its hidden states to the next stage, which takes them at the same place.

Features that leave the encoder early (DeepStack) go along to the last stage, where all meet.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class StageLink:
    """What a stage takes from the stage before it and gives to the next, in the order of its forward.

    Attributes:
        take: gives the next tensor of the stage before, like the one that stands for it. Set before every forward.
        given: what the running forward gives to the next stage.
        late: features of the stage's last layer. They follow its hidden states, as the next stage reads them.
        gets_gradients: whether the next stage returns gradients of what it is given, because this stage or one before
            it is trained.
        returns_gradients: whether this stage returns gradients of what it takes, because one before it is trained.
    """

    def __init__(self) -> None:
        self.take: Callable[[Tensor], Tensor] | None = None
        self.given: list[Tensor] = []
        self.late: list[Tensor] = []
        self.gets_gradients = self.returns_gradients = False

    def taken(self, like: Tensor) -> Tensor:
        assert self.take is not None
        return self.take(like)


class OtherLayer(nn.Module):
    """Stands for a layer of another stage: passes its input on."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class LayerBefore(OtherLayer):
    """Stands for the last layer of the stage before: gives what that one has made."""

    def __init__(self, link: StageLink):
        super().__init__()
        self.link = link

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.link.taken(hidden)


class LayerAfter(OtherLayer):
    """Stands for the first layer of the stage after, which gets what this one is given."""

    def __init__(self, link: StageLink):
        super().__init__()
        self.link = link

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        self.link.given += [hidden, *self.link.late]
        self.link.late = []
        return hidden


class OtherModule(nn.Module):
    """Stands for a module of another stage: gives zeros of the shape that it would give.

    Args:
        module: that module.
        dtype: the dtype in which the encoder computes.

    Attributes:
        weight: a tensor without elements: Pixtral reads the dtype of a module's weight.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self._shapes = (module.to("meta"),)  # in a tuple, so that its parameters are not this one's
        self.weight = torch.empty(0, dtype=dtype)

    @torch.no_grad()
    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        like = inputs[0]
        # Sizes of images beside them are read, and have to keep their values.
        moved = [tensor.to("meta") if tensor.is_floating_point() or tensor is like else tensor for tensor in inputs]
        empty = self._shapes[0](*moved, **options)
        return torch.zeros((), dtype=self.weight.dtype, device=like.device).expand(empty.shape)


class FeatureBefore(OtherModule):
    """Stands for a module that makes features on a stage before: gives what that one has made."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, link: StageLink, is_last: bool):
        super().__init__(module, dtype)
        self.link, self.is_last = link, is_last

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        feature = self.link.taken(super().forward(*inputs, **options))
        if not self.is_last:
            self.link.given.append(feature)
        return feature


def split_encoder(
    body: nn.Module,
    layers: nn.ModuleList,
    features: tuple[nn.ModuleList, list[int]] | None,
    dtype: torch.dtype,
    stage: int,
    stages: int,
) -> StageLink:
    """Leaves one stage of an encoder, in place: earlier stages have a layer more if layers do not divide.

    Args:
        body: what holds the layers; modules before them are the first stage's, those after them the last one's.
        layers: its layers.
        features: modules that make features of some layers, and the numbers of these layers; None without them.
        dtype: the dtype in which the encoder computes.
        stage, stages: number of the stage, and of all stages.
    """
    link = StageLink()
    each, more = divmod(len(layers), stages)
    first = stage * each + min(stage, more)
    stop = first + each + (stage < more)
    before, behind = _around(body, layers)
    makers, of_layers = features if features is not None else (nn.ModuleList(), [])
    earlier = [maker for maker, number in zip(makers, of_layers, strict=True) if number < first]
    link.returns_gradients = stage > 0 and any(map(_is_trained, [*before, *layers[:first], *earlier]))
    for module in before if stage > 0 else []:
        _replace(body, module, dtype)
    for module in behind if stage < stages - 1 else []:
        if module is not makers:
            _replace(body, module, dtype)
    for place, (maker, number) in enumerate(zip(list(makers), of_layers, strict=True)):
        if number >= stop:
            makers[place] = OtherModule(maker, dtype)
        elif number < first:
            makers[place] = FeatureBefore(maker, dtype, link, stage == stages - 1)
        elif stage < stages - 1:
            maker.register_forward_hook(_giving(link, is_late=number == stop - 1))
    for number, layer in enumerate(list(layers)):
        if number == first - 1:
            layers[number] = _of_class(layer, LayerBefore(link))
        elif number == stop:
            layers[number] = _of_class(layer, LayerAfter(link))
        elif not first <= number < stop:
            layers[number] = _of_class(layer, OtherLayer())
    link.gets_gradients = link.returns_gradients or _is_trained(body)
    return link


def _of_class(layer: nn.Module, stand_in: nn.Module) -> nn.Module:
    """The stand-in as an instance of the layer's class, too: transformers counts hidden states by what these give."""
    own = type(stand_in)
    stand_in.__class__ = type(own.__name__, (own, type(layer)), {})
    return stand_in


def _giving(link: StageLink, is_late: bool) -> Callable[..., None]:
    """A hook that gives a module's output to the next stage."""

    def give(_: nn.Module, __: Any, output: Tensor) -> None:
        (link.late if is_late else link.given).append(output)

    return give


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _around(body: nn.Module, layers: nn.ModuleList) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules with parameters that run before the layers, and those after them: transformers registers modules in
    the order in which they run."""
    (path,) = [name for name, module in body.named_modules() if module is layers]
    before: list[nn.Module] = []
    behind: list[nn.Module] = []
    holder = body
    for name in path.split("."):
        found = before
        for child_name, child in holder.named_children():
            if child_name == name:
                found = behind
            elif any(True for _ in child.parameters()):
                found.append(child)
        holder = holder.get_submodule(name)
    return before, behind


def _replace(body: nn.Module, module: nn.Module, dtype: torch.dtype) -> None:
    (path,) = [name for name, found in body.named_modules() if found is module]
    body.set_submodule(path, OtherModule(module, dtype))
