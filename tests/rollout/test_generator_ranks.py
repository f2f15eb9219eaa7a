"""A model whose weights lie in parts on two ranks writes what a whole one does, and neither rank waits for ever."""

import os
import socket

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from strop.rollout.generator import InProcessGenerator, is_sharded
from strop.rollout.types import Sampling

PROMPTS = ([[5, 6, 7], [8, 9]], [[4], [4]])
BUDGETS = ([2, 1], [5, 3])
"""Of each rank."""


def write(model, rank: int, by_generate: bool) -> list[list[int]]:
    generator = InProcessGenerator(model)
    generator.obstacle = "asked to" if by_generate else None
    rows = [2 * rank, 2 * rank + 1]
    written = generator.generate(PROMPTS[rank], Sampling(max_tokens=5), rows=rows, max_tokens=BUDGETS[rank])
    return [completion.token_ids for completion in written]


def on_a_rank(rank: int, port: int, model: LlamaForCausalLM, by_generate: bool, folder: str) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    assert is_sharded(model)
    passes: list[int] = []
    model.register_forward_hook(lambda *args: passes.append(1))
    torch.save((write(model, rank, by_generate), len(passes)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("by_generate", [False, True], ids=["stream", "generate"])
def test_sharded_ranks_make_the_same_number_of_passes(tiny_llama, tmp_path, by_generate):
    """One rank's rows end after two tokens, the other's after five."""
    assert not is_sharded(tiny_llama)
    expected = [write(tiny_llama, rank, by_generate) for rank in (0, 1)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (port, tiny_llama, by_generate, str(tmp_path))
    torch.multiprocessing.start_processes(on_a_rank, args=arguments, nprocs=2, start_method="fork")
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert [written for written, _ in results] == expected
    assert [passes for _, passes in results] == [5, 5]
