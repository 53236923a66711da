"""Options of docs/algorithms.md through whole runs, as a user sets them, with two ranks and two
engines on S3; and a mismatch that stops one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import S3Server
from tests.pipeline import MINI, Folder, Undisturbed, read_record

pytestmark = pytest.mark.e2e
TWO = [*MINI, "rl.num_iterations=2"]
TWO_OF_EVERYTHING = ["trainer.ranks=2", "engines.count=2"]
OPTIONS = {
    "reinforce++": ["rl.estimator=reinforce_plus_plus", "rl.gamma=0.95", "rl.group_size=1",
                    "rl.num_prompts=32", "rl.kl=reward",
                    "rl.kl_coef=0.05", "rl.kl_estimator=k1"],
    "gspo": ["rl.objective=gspo", "rl.clip_low=3e-4", "rl.clip_high=4e-4",
             "rl.dual_clip=3.0", "rl.aggregation=sequence_mean",
             "rl.importance=sequence_mask", "rl.estimator=opo", "rl.kl=reward", "rl.kl_coef=0.05"],
    "dppo": ["rl.objective=dppo", "rl.importance=none", "rl.estimator=maxrl",
             "rl.mask_truncated=true", "rl.rounds_max=3"],
    "engine": ["rl.proximal=engine", "rl.importance=none", "rl.filters={}"],
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("reinforce++", marks=pytest.mark.first),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gspo", "dppo", "engine")),
    ],
)
def test_options_reach_the_trainer_and_every_check_of_a_first_step_holds(
    name: str, tmp_path: Path, s3_server: S3Server, prefect_api: dict[str, str]
) -> None:
    folder = Folder(tmp_path, s3_server.url(), {**s3_server.environment, **prefect_api})
    output = folder.complete("a", *TWO, *TWO_OF_EVERYTHING, *OPTIONS[name])
    for sign in ("is not on-policy", "the first step clips", "differs from the reference"):
        assert sign not in output, output[-3000:]
    metrics = read_record(folder, "a", 1)["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["train/onpolicy_abs"] < 1e-6
    assert metrics["train/grad_norm"] > 0
    assert ("train/kl" in metrics) == ("rl.kl=reward" in OPTIONS[name])
    if name == "gspo":
        assert metrics["train/clip_fraction_low"] + metrics["train/clip_fraction_high"] > 0


@pytest.mark.nightly
def test_a_mismatch_stops_the_run_before_the_policy_and_it_goes_on_when_allowed(
    folder: Folder, undisturbed: Undisturbed
) -> None:
    code, output = folder.rlpipe(*folder.run_arguments("a", *TWO, "rl.mismatch_max=1e-12", "rl.on_mismatch=fail"))
    assert code == 1, output[-3000:]
    assert "The policy was not committed, the batch is kept" in output
    store = folder.open_store()
    assert store.exists("runs/a/rl/00000/batch/round-0/manifest.json")
    assert not store.exists("runs/a/rl/00000/policy/manifest.json")
    output = folder.complete("a", *TWO, "rl.on_mismatch=fail")
    assert "engine and trainer disagree" not in output
    assert folder.final_sha256("a", 2) == undisturbed.sha256(2)
