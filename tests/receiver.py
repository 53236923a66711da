"""A process that joins the group of a trainer as SGLang's scheduler does, is sent
tensors, and writes them as a file."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous


def main(argument: str) -> None:
    place = json.loads(argument)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    address, timeout = f"tcp://{place['address']}:{place['port']}", timedelta(seconds=place["deadline_s"])
    store, rank, size = next(rendezvous(address, place.get("rank", 1), place["size"], timeout=timeout))
    prefixed = PrefixStore(place["group"], store)
    group, _ = _new_process_group_helper(
        size, rank, [], Backend("gloo"), prefixed, group_name=place["group"], timeout=timeout
    )
    _world.pg_group_ranks[group] = {index: index for index in range(size)}
    if place.get("die"):
        os._exit(9)
    received = {}
    for bucket in place["buckets"]:
        for name, dtype, shape in zip(bucket["names"], bucket["dtypes"], bucket["shapes"], strict=True):
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(received[name], src=0, group=group)
    save_file(received, place["target"])


if __name__ == "__main__":
    main(sys.argv[1])
