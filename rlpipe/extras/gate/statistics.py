"""Statistics of paired scores: pure. Legend of the shapes: N prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from rlpipe.base.seeds import rollout_seed

CONFIDENCE = 0.95  # of the two-sided interval
DRAWS = 10_000  # of the bootstrap
BATCH_NUMBERS = 4_000_000  # drawn at a time: 32 MB


@dataclass(frozen=True)
class Difference:
    """The paired difference of a metric, new policy minus old one, over prompts."""

    metric: str
    prompts: int
    before: float  # the mean of the old policy
    after: float
    difference: float
    low: float  # of the interval of CONFIDENCE
    high: float
    better: int  # prompts that the new policy scores higher
    worse: int
    sign_p: float | None  # two-sided, of the exact sign test; None where scores are not 0 and 1


def difference(metric: str, old_N: np.ndarray, new_N: np.ndarray) -> Difference:
    """The paired difference of two or more prompts with its interval.

    The sign test is exact and ignores ties: under the hypothesis of no difference each prompt whose
    scores differ is as likely better as worse (Dixon and Mood 1946).
    """
    assert old_N.shape == new_N.shape and len(old_N) > 1
    differences_N = new_N - old_N
    low, high = interval(differences_N, rollout_seed("gate", metric))
    better, worse = int((differences_N > 0).sum()), int((differences_N < 0).sum())
    both = np.concatenate([old_N, new_N])
    is_binary = bool(np.isin(both, (0.0, 1.0)).all())
    return Difference(
        metric,
        len(old_N),
        float(old_N.mean()),
        float(new_N.mean()),
        float(differences_N.mean()),
        low,
        high,
        better,
        worse,
        sign_test(better, worse) if is_binary else None,
    )


def interval(values_N: np.ndarray, seed: int) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean, of CONFIDENCE, from DRAWS draws of N prompts
    (Efron and Tibshirani 1993, chapter 13).
    """
    if values_N.min() == values_N.max():  # means of equal numbers may differ in their last bit
        return float(values_N[0]), float(values_N[0])
    bounds = stats.bootstrap(
        (values_N,),
        np.mean,
        n_resamples=DRAWS,
        batch=max(1, BATCH_NUMBERS // len(values_N)),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(bounds.low), float(bounds.high)


def sign_test(better: int, worse: int) -> float:
    """The two-sided p of the exact sign test; 1 where no prompt differs."""
    return float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
