"""Offloaded activations: the same gradients, each tensor once there and once back, and only those worth it."""

import gc

import pytest
import torch
from torch import nn

from strop.models.offload import OffloadActivations


class Copies:
    """A mover whose far side is a copy on the same device; it notes what travels."""

    def __init__(self):
        self.sent: list[torch.Tensor] = []
        self.fetched: list[int] = []
        self.waited = 0

    def to_host(self, tensor):
        self.sent.append(tensor.clone())
        return self.sent[-1]

    def to_device(self, tensor):
        self.fetched.append(next(i for i, sent in enumerate(self.sent) if sent is tensor))
        return tensor.clone(), "arrived"

    def wait(self, tensor, arrival):
        assert arrival == "arrived"
        self.waited += 1


def gradients(model, ids, context=None):
    model.zero_grad()
    if context is None:
        model(input_ids=ids, labels=ids).loss.backward()
    else:
        with context:
            model(input_ids=ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def ids():
    return torch.randint(0, 400, (2, 40))


def test_gradients_are_the_same_step_after_step(tiny_llama, ids):
    expected = gradients(tiny_llama, ids)
    mover = Copies()
    offload = OffloadActivations(tiny_llama, "cpu", mover)
    for _ in range(2):
        assert all(map(torch.equal, gradients(tiny_llama, ids, offload), expected))
    assert len(mover.sent) > 20
    assert sorted(mover.fetched) == list(range(len(mover.sent)))  # each once, none fetched in vain
    assert mover.waited > len(mover.sent)  # some are saved by several operations


def test_with_activation_checkpointing(tiny_llama, ids):
    expected = gradients(tiny_llama, ids)
    tiny_llama.activation_checkpointing_enable()
    assert all(map(torch.equal, gradients(tiny_llama, ids, OffloadActivations(tiny_llama, "cpu", Copies())), expected))


def test_neither_weights_nor_logits_nor_small_tensors_travel(tiny_llama, ids):
    mover = Copies()
    gradients(tiny_llama, ids, OffloadActivations(tiny_llama, "cpu", mover))
    weights = list(tiny_llama.parameters())
    for sent in mover.sent:
        assert sent.nbytes >= 1024
        assert sent.shape[-1] != 400
        assert not any(sent.numel() == w.numel() and torch.equal(sent.flatten(), w.flatten()) for w in weights)


class Chain(nn.Module):
    """x -> exp of exp of ... x: every step saves its output, which is the next one's input."""

    class config:
        @staticmethod
        def get_text_config():
            return type("config", (), {"vocab_size": -1})

    def forward(self, x, depth):
        outputs = []
        for _ in range(depth):
            x = x.sin().exp()
            outputs.append(x)
        return outputs


def test_the_backward_pass_fetches_ahead(ids):
    """sin saves its input, exp its output, and one step's output is the next one's input: depth + 1 tensors."""
    mover = Copies()
    x = torch.randn(256, requires_grad=True)
    with OffloadActivations(Chain(), "cpu", mover):
        outputs = Chain()(x.exp(), 4)
        assert len(mover.sent) == 5
        outputs[-1].sum().backward()
    assert mover.fetched == [4, 2, 3, 1, 0]


def test_a_tensor_changed_in_place_is_another_one():
    mover = Copies()
    with OffloadActivations(Chain(), "cpu", mover), torch.no_grad():
        context = OffloadActivations(Chain(), "cpu", mover)
        x = torch.ones(300)
        first, again = context.pack(x), context.pack(x)
        x.add_(1)
        changed = context.pack(x)
    assert first is again
    assert changed is not first
    assert (context.unpack(first)[0], context.unpack(changed)[0]) == (1, 2)


def test_memory_that_is_used_again_is_not_mistaken():
    """A freed tensor's address may come back with other content; a stash is known by its storage, not its address."""
    context = OffloadActivations(Chain(), "cpu", Copies())
    packed = []
    for value in range(5):
        x = torch.full((4096,), float(value))
        packed.append(context.pack(x))
        del x
        gc.collect()
    assert [context.unpack(p)[0].item() for p in packed] == [0, 1, 2, 3, 4]


def test_expanded_tensors_stay():
    context = OffloadActivations(Chain(), "cpu", Copies())
    expanded = torch.ones(1, 300).expand(50, 300)
    assert context.pack(expanded) is expanded


def test_nothing_is_held_after_a_step(tiny_llama, ids):
    offload = OffloadActivations(tiny_llama, "cpu", Copies())
    gradients(tiny_llama, ids, offload)
    assert (offload.order, offload.places, offload.weights) == ([], {}, set())


def test_a_cpu_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"activation_offloading=True .*this run is on a CPU"):
        OffloadActivations(tiny_llama, "cpu")
