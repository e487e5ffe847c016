"""Runs the encoder beside the language model's pipeline: images in, embeddings for microbatches out, gradients back.

The images of all microbatches of a step are encoded before the language model's first forward. The encoder's backward
runs after the language model's last one. So a pipeline schedule knows nothing of the encoder. The embeddings of each
microbatch are a leaf tensor, in which the schedule leaves their gradient. Images of a microbatch that have the same
pixels, as in a pair of completions or a group of them, are encoded once, and their gradients are summed.

A step without any image leaves the encoder without gradients, so its optimizer does nothing, as in one process. If only
this rank has no image, it encodes a blank one to join its peers' collectives; that one does not count.
"""

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from automodel_rl.batch import Image, Microbatch, distinct_images
from automodel_rl.model.handle import ModelHandle
from automodel_rl.model.vision import VisionPart, blank_image
from automodel_rl.parallel.gradients import sum_partial_gradients
from automodel_rl.parallel.sharding import reduce_gradients, release_gathered
from automodel_rl.step.bridge import Bridge

READING_THREADS = 8
"""Number of threads that read pictures on each rank with the encoder."""

Place = tuple[int, int]
"""The index of a microbatch of a lane, and the index of an image in it."""


class ImageEncoder:
    """Embeds the images of all microbatches on the ranks with the encoder, for the ranks with a first stage.

    Every method is a collective of all ranks of the job.

    Args:
        part: the encoder; None on ranks without it.
        bridge: the bridge to the language model. `bridge.py` says what lanes are.
        blank: an image that a rank of the encoder without images encodes, so that it joins its peers' collectives.
        like: a tensor [0, E] of the embeddings' dtype, on the device. E is the hidden size of the language model, or a
            multiple of it if features follow each embedding (batch/images.py).
        trains: whether embeddings need gradients; the same on all ranks.
        partial: parameters, as (module, name), for which each tp rank's gradient is only a summand.
    """

    def __init__(
        self,
        part: VisionPart | None,
        bridge: Bridge,
        blank: Image,
        like: Tensor,
        trains: bool,
        partial: Sequence[tuple[nn.Module, str]],
    ):
        self.part, self.bridge, self.blank, self.like, self.trains = part, bridge, blank, like, trains
        self.partial = partial
        self._images: dict[int, list[tuple[Image, ...]]] = {}
        self._shares: dict[int, list[list[Place]]] = {}
        self._encoded: list[tuple[int, Tensor]] = []

    def forward(self, microbatches: Sequence[Microbatch], train: bool) -> list[Tensor]:
        """Embeddings [m, E] of every microbatch of this rank, m may be 0; empty on ranks without a first stage.

        Args:
            microbatches: this data rank's microbatches.
            train: whether to keep what `backward` needs.
        """
        self._images = self.bridge.exchange([distinct_images(microbatch.images) for microbatch in microbatches])
        self._shares = {lane: self._dealt(lane) for lane in self.bridge.lanes}
        self._encoded = []
        if self.part is not None and self.bridge.any_encoder(any(map(any, self._images.values()))):
            with torch.set_grad_enabled(train and self.trains):
                self._encoded = self._encode(self.part)
        flat = {
            lane: torch.cat([self.like, *(chunk.detach() for number, chunk in self._encoded if number == lane)])
            for lane in self.bridge.served_lanes
        }
        received = self.bridge.to_language(flat, self._sizes(), self.like)
        if self.bridge.own_lane is None:
            return []
        pieces: dict[Place, Tensor] = {}
        for tensor, places in zip(received, self._shares[self.bridge.own_lane], strict=True):
            counts = [self._image(self.bridge.own_lane, place).num_tokens for place in places]
            pieces |= dict(zip(places, tensor.split(counts), strict=True))
        leaves = [
            torch.cat([self.like, *(pieces[microbatch, number] for number in range(len(images)))])
            for microbatch, images in enumerate(self._images[self.bridge.own_lane])
        ]
        return [leaf.requires_grad_(train and self.trains) for leaf in leaves]

    def backward(self, leaves: list[Tensor]) -> None:
        """Runs the encoder's backward, from the gradients of what `forward` returned."""
        if not self.trains:
            self._release()
            return
        gradients: list[Tensor] = []
        if self.bridge.own_lane is not None:
            lane = self.bridge.own_lane
            pieces: dict[Place, Tensor] = {}
            for microbatch, (leaf, images) in enumerate(zip(leaves, self._images[lane], strict=True)):
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                split = gradient.split([image.num_tokens for image in images]) if images else ()
                pieces |= {(microbatch, number): piece for number, piece in enumerate(split)}
            gradients = [torch.cat([self.like, *(pieces[p] for p in places)]) for places in self._shares[lane]]
        left = self.bridge.to_encoder(gradients, self._sizes(), self.like)
        for number, (lane, chunk) in enumerate(self._encoded):
            assert self.part is not None
            reduce_gradients(self.part, number == len(self._encoded) - 1)
            gradient = torch.zeros_like(chunk)
            if lane in left:  # a blank image does not count
                gradient, left[lane] = left[lane].split([len(chunk), len(left[lane]) - len(chunk)])
            chunk.backward(gradient)
        if self._encoded and self.bridge.vision.tp_group is not None:
            parameters = [module.get_parameter(name) for module, name in self.partial]
            sum_partial_gradients(parameters, self.bridge.vision.tp_group)
        self._encoded, self._images = [], {}

    def abandon_step(self) -> None:
        """Drops what is kept for a backward that will not come."""
        self._encoded, self._images = [], {}

    def _release(self) -> None:
        """Releases weights that a forward without backward has gathered."""
        self.abandon_step()
        if self.part is not None:
            release_gathered(self.part)

    def _encode(self, part: VisionPart) -> list[tuple[int, Tensor]]:
        """The lane and the embeddings of each microbatch that has images for this rank, in order."""
        microbatches: dict[tuple[int, int], list[Image]] = {}
        for lane in self.bridge.served_lanes:
            assert self.bridge.own_share is not None
            for place in self._shares[lane][self.bridge.own_share]:
                microbatches.setdefault((lane, place[0]), []).append(self._image(lane, place))
        microbatches = microbatches or {(-1, 0): [self.blank]}
        # Pictures of later microbatches are read while the device encodes those of earlier ones.
        with ThreadPoolExecutor(READING_THREADS) as pool:
            pixels = pool.map(Image.load, itertools.chain(*microbatches.values()))
            return [
                (lane, self._run(part, images, list(itertools.islice(pixels, len(images)))))
                for (lane, _), images in microbatches.items()
            ]

    def _run(self, part: VisionPart, images: Sequence[Image], loaded: Sequence[Tensor]) -> Tensor:
        pixels = [tensor.to(self.like) for tensor in loaded]
        embeddings = part(pixels, [image.grid for image in images])
        expected = sum(image.num_tokens for image in images)
        if embeddings.shape != (expected, self.like.shape[1]):
            raise ValueError(
                f"{len(images)} images with grids {[image.grid for image in images]} have {expected} tokens in their "
                f"sequences, but the encoder makes {len(embeddings)} embeddings of them: use the model's own image "
                "processor, and as many tokens as it says"
            )
        return embeddings

    def _image(self, lane: int, place: Place) -> Image:
        return self._images[lane][place[0]][place[1]]

    def _dealt(self, lane: int) -> list[list[Place]]:
        """A lane's images, dealt to the encoder lanes that serve it: largest first, each to that with least work."""
        images = {
            (microbatch, number): math.prod(image.grid)
            for microbatch, of_microbatch in enumerate(self._images[lane] or ())
            for number, image in enumerate(of_microbatch)
        }
        shares: list[list[Place]] = [[] for _ in self.bridge.lanes[lane].encoder_leaders]
        load = [0] * len(shares)
        for place in sorted(images, key=lambda p: (-images[p], p)):
            least = load.index(min(load))
            shares[least].append(place)
            load[least] += images[place]
        return [sorted(share) for share in shares]

    def _sizes(self) -> dict[int, list[int]]:
        """Number of tokens that each serving encoder lane makes, by language lane."""
        return {
            lane: [sum(self._image(lane, place).num_tokens for place in share) for share in shares]
            for lane, shares in self._shares.items()
        }


def make_image_encoder(handle: ModelHandle) -> ImageEncoder | None:
    """The encoder of a vision-language model, on all ranks of the job; None for a model that reads text only."""
    vision, components = handle.meshes.vision, handle.meshes.components
    if vision is None or components is None:
        return None
    part = next((component.parts[0] for component in handle.components if component.name == "vision"), None)
    width = handle.config.hidden_size * (1 + handle.num_deepstack)
    return ImageEncoder(
        part,
        Bridge(vision, handle.layout, components.vision.ranks, components.language.ranks),
        blank_image(handle.whole_config),
        like=torch.empty(0, width, dtype=handle.dtype, device=handle.layout.device),
        trains=handle.trains_encoder,
        partial=handle.partial_in_encoder,
    )
