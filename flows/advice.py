"""What to do about a failure: the last sentences of a failed flow run's message, for the person who finds it in the morning."""

from __future__ import annotations

from rlpipe.rewards.process import RewardLost
from rlpipe.store.lease import RunHeld
from rlpipe.types import EngineError, StepRefused, StoreError, TrainerError, UserError

AGAIN = "then start the run again (in the UI: Retry): it goes on after the newest committed stage"
ADVICE: list[tuple[type[Exception], str]] = [  # the first that fits
    (RunHeld, ""),  # these two say it themselves
    (StepRefused, ""),
    (
        UserError,
        "In the UI, Retry starts it again with the same parameters; where a field has to change, start it anew under the same run name",
    ),
    (StoreError, f"`rlpipe verify` lists every damaged file of a run; restore it, {AGAIN}"),
    (
        TrainerError,
        "If the trainer's log ends without an error, the kernel killed it for memory: lower trainer.tokens_max, set "
        f"trainer.activation_checkpointing, or give it more memory. Mend the cause, {AGAIN}",
    ),
    (EngineError, f"The engines' logs say why; mend the cause (memory: lower engines.in_flight_max), {AGAIN}"),
    (RewardLost, f"Mend the cause, {AGAIN}"),
    (OSError, f"The disk, the network or the store failed. Wait until it is back, {AGAIN}"),
]


def with_advice(error: Exception) -> Exception:
    """The error with what to do about it in its message; itself where there is nothing to add, or it was added already."""
    kind, told = next(((kind, text) for kind, text in ADVICE if isinstance(error, kind)), (Exception, ""))
    return error if not told or told in str(error) else kind(f"{str(error).rstrip('.')}. {told}")
