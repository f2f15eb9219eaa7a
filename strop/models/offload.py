"""Activations kept in host memory between forward and backward, so that the accelerator holds only a few at a time."""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from strop.models.adapters import base_model

MIN_BYTES = 1024
PREFETCH = 2


class Mover(Protocol):
    """How tensors get to the host and back. Both may return before the copy is done, which `wait` waits for."""

    def to_host(self, tensor: Tensor) -> Tensor: ...
    def to_device(self, tensor: Tensor) -> tuple[Tensor, Any]: ...
    def wait(self, tensor: Tensor, arrival: Any) -> None: ...


class StreamMover:
    """Copies on a stream of their own, through page-locked memory, beside the computation."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.Stream(device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, made once all that was queued before is computed."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host

    def to_device(self, tensor: Tensor) -> tuple[Tensor, torch.Event]:
        """A copy on the device, and the event of its arrival."""
        with self.stream:
            return tensor.to(self.device, non_blocking=True), self.stream.record_event()

    def wait(self, tensor: Tensor, arrival: torch.Event) -> None:
        """Has all that is queued from now on wait until `tensor` has arrived."""
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(arrival)
        tensor.record_stream(current)


class Stash:
    """One tensor that is away: on the host, or on its way back."""

    def __init__(self, host: Tensor, index: int):
        self.host = host
        self.index = index
        """Place in the order of saving."""
        self.journey: tuple[Tensor, Any] | None = None

    def fetch(self, mover: Mover) -> tuple[Tensor, Any]:
        """The tensor on its device and the sign of its arrival; starts the copy if it hasn't started yet."""
        if self.journey is None:
            self.journey = mover.to_device(self.host)
        return self.journey


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context of one training step (forward and backward pass): tensors saved for the backward pass go to the host.

    Stay where they are: tensors under 1 KiB, weights and views of them, logits (the backward pass begins with them),
    tensors that overlap themselves, everything on the host. A tensor that several operations save travels once. The
    backward pass needs tensors in about the reverse order of saving, so each one that comes back has the two saved
    before it follow. Refuses a CPU, where activations are in host memory to begin with.
    """

    def __init__(self, model: nn.Module, device: torch.device | str, mover: Mover | None = None):
        device = torch.device(device)
        if device.type == "cpu" and mover is None:
            raise ValueError(
                "activation_offloading=True moves activations from an accelerator to host memory, and this run is on a "
                "CPU, where they are in host memory already: it could only cost time. Set it to False; "
                "gradient_checkpointing=True saves memory on a CPU too."
            )
        super().__init__(self.pack, self.unpack)
        self.model, self.device = model, device
        self.mover = StreamMover(device) if mover is None else mover
        self.vocab_size = base_model(model).config.get_text_config().vocab_size
        self.forget()

    def forget(self) -> None:
        """Drops all that is remembered of a step."""
        self.order: list[weakref.ref[Stash]] = []
        self.places: dict[tuple, tuple[StorageWeakRef, weakref.ref[Stash]]] = {}
        self.weights: set[int] = set()

    def __enter__(self) -> "OffloadActivations":
        self.weights = storages([*self.model.parameters(), *self.model.buffers()])
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.forget()

    def stays(self, tensor: Tensor) -> bool:
        """Whether `tensor` isn't worth a journey, or can't make one."""
        if tensor.nbytes < MIN_BYTES or tensor.device.type != self.device.type:
            return True
        return tensor.shape[-1] == self.vocab_size or address(tensor) in self.weights or overlaps_itself(tensor)

    def pack(self, tensor: Tensor) -> Tensor | Stash:
        """What the graph keeps in place of `tensor`."""
        if self.stays(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        place = (storage.cdata, tensor._version, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        _, known = self.places.get(place, (storage, None))
        stash = known() if known is not None else None
        if stash is None:
            stash = Stash(self.mover.to_host(tensor.detach()), len(self.order))
            self.order.append(weakref.ref(stash))
            self.places[place] = (storage, weakref.ref(stash))
        return stash

    def unpack(self, packed: Tensor | Stash) -> Tensor:
        """The tensor again, on its device."""
        if isinstance(packed, Tensor):
            return packed
        tensor, arrival = packed.fetch(self.mover)
        for earlier in self.order[max(packed.index - PREFETCH, 0) : packed.index]:
            if (stash := earlier()) is not None:
                stash.fetch(self.mover)
        self.mover.wait(tensor, arrival)
        return tensor


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory under `tensors`."""
    return {address(tensor) for tensor in tensors}


def address(tensor: Tensor) -> int:
    """Address of the memory under `tensor`."""
    return tensor.untyped_storage().data_ptr()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements share memory, as after `expand`: a copy would be larger than the tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
