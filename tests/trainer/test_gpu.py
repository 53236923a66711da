"""The same step on CUDA, nccl and bf16. Skipped, visibly, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlpipe.trainer.policy_files import HostCopies
from tests.deadlines import PIPELINE_S

CODE = """
import dataclasses, sys, math
from pathlib import Path
from tests import trainer_world as world
from rlpipe.trainer import moments
from rlpipe.trainer.ranks import join_ranks
from rlpipe.trainer.trainer import Trainer
options = world.options(Path(sys.argv[1]), gpu_ids=[0], dtype=sys.argv[2], tokens_max=512, activation_checkpointing=True)
ranks = join_ranks(options)
trainer = Trainer(ranks)
data = world.batch(ranks.store, "batch", world.rollout_rows(6, 4))
fingerprints = []
moments.PART_BYTES = 40_000  # many parts come and go
for turn, offload in enumerate(("none", "none", "optimizer")):
    of_turn = options.trainer.model_copy(update={"offload": offload})
    trainer = Trainer(dataclasses.replace(ranks, options=options.model_copy(update={"trainer": of_turn})))
    world.run(trainer, "load", world.load_new())
    metrics = world.run(trainer, "train", world.train("a", "b", "rl", data))["metrics"]
    assert metrics["train/onpolicy_abs"] < 1e-6 and math.isfinite(metrics["train/grad_norm"]), metrics
    saved = world.run(trainer, "save", world.save("b", f"policy-{turn}", f"state-{turn}"))
    fingerprints.append([world.digests(saved["policy"]), world.digests(saved["state"])])
assert fingerprints[0] == fingerprints[1], "two executions of one job differ"
assert fingerprints[0] == fingerprints[2], "moments on the host give other bits"
world.run(trainer, "load", world.load_ref("b", "state", world.saved(ranks.store, "state-2", saved["state"])))
again = world.run(trainer, "save", world.save("b", "policy-3", "state-3"))
assert world.digests(again["state"]) == fingerprints[0][1]
"""  # noqa: E501


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_on_cuda(tmp_path: Path, dtype: str) -> None:
    script = tmp_path / "step.py"
    script.write_text(CODE)
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
        str(script),
        str(tmp_path),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([".", *sys.path]),
    }  # whatever pytest itself has its packages from
    done = subprocess.run(
        [*argv, dtype], env=environment, capture_output=True, text=True, timeout=PIPELINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_main_memory_by_way_of_pinned_memory_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.trainer.policy_files.BUFFER_BYTES", 1 << 16)
    device = torch.device("cuda", 0)
    tensors = [torch.randn(shape, device=device) for shape in [(1 << 20,), (300, 700), (), (0, 4), (1 << 14,), (3, 5)]]
    tensors += [tensors[1].T, tensors[0].bfloat16(), torch.arange(9, device=device)]
    with HostCopies(device) as copies:
        copied = []
        for tensor in tensors:
            busy = torch.randn(2000, 2000, device=device)
            copied.append(
                copies.copy(tensor * (busy @ busy).isfinite().all())
            )  # made by what still runs when it is asked for
    for tensor, copy in zip(tensors, copied, strict=True):
        assert copy.device.type == "cpu" and copy.is_contiguous() and torch.equal(copy, tensor.cpu())
