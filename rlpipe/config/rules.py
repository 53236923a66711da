"""The rules between fields.

A rule is a condition, and a line for the user that begins with the field in the user's form.

All rules are checked, and all broken ones are reported together. The bounds of a single field are
declared with the field.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from datetime import date, time
from itertools import pairwise

from rlpipe.base.values import powers_of_two
from rlpipe.config.colocation import broken_colocation
from rlpipe.config.extras import ENGINES
from rlpipe.config.model import ModelConfig
from rlpipe.config.operational import LOCAL_THREADS, EnginesConfig, broken_environment
from rlpipe.config.overlap import broken_overlap
from rlpipe.config.sections import Sections
from rlpipe.config.training import RlConfig
from rlpipe.config.transport import PARALLEL_FLAGS, broken_transport

NUMBER_MAX, FLOAT_MAX = 1 << 53, 1e30


def is_run_name(name: str) -> bool:
    """True when `name` can be the name of a run, which is also the name of its folder."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None


def broken_rules(config: Sections) -> Iterator[str]:
    """One line for each rule that the config breaks.

    Example: "rl.group_size=1: the filter nonzero_std drops ...".
    """
    yield from _of_values("", config.model_dump())
    yield from _of_model(config.model)
    yield from _of_data(config)
    yield from _of_sampling(config)
    yield from _of_advantages(config.rl)
    yield from _of_losses(config.rl)
    yield from _of_teacher(config)
    yield from broken_overlap(config.rl)
    yield from _of_stored_rollouts(config)
    yield from _of_places_and_limits(config)
    yield from _of_what_is_kept(config)
    yield from broken_environment(config.engines)
    yield from _of_gate(config)


def _of_values(name: str, value: object) -> Iterator[str]:
    """Yields one line for each value that a config cannot have: it is stored as JSON, and must have
    the same values wherever it is read.
    """
    if isinstance(value, date | time):  # TOML has such values
        yield (
            f"{name}={value}: a config holds text, numbers, lists and tables, and no date or time; write this value in"
            " quotes"
        )
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield (
            f"{name}={value!r:.200}: is not valid text: it has half of a surrogate pair, or bytes that are not"
            " UTF-8; remove these"
        )
    elif isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            if isinstance(key, str):
                yield from _of_values(name, key)
            yield from _of_values(f"{name}.{key}".lstrip("."), entry)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name}={value}: is not a finite number; use one"
    elif isinstance(value, int | float) and abs(value) > (
        largest := NUMBER_MAX if isinstance(value, int) else FLOAT_MAX
    ):
        yield f"{name}={value}: is too large, a number may be at most {largest:g}"


def _of_model(model: ModelConfig) -> Iterator[str]:
    for name in ("adapter_rank", "adapter_alpha", "adapter_targets") if model.adapter == "none" else ():
        info, value = type(model).model_fields[name], getattr(model, name)
        if value != info.get_default(call_default_factory=True):
            yield (
                f"model.{name}={value!r}: no adapter is trained (model.adapter = 'none'); set model.adapter ="
                " 'lora', or remove this field"
            )
    if model.path:
        if "context_tokens_max" not in model.model_fields_set:
            yield (
                f"model.context_tokens_max is not given: with {model.path=} it has no default, because longer"
                " sequences are truncated; set the most tokens of a prompt with its completion"
            )
        return
    if model.hidden_size % (2 * model.num_heads):
        yield (
            f"{model.hidden_size=}: each of {model.num_heads=} heads needs an equal share of it, of even size; use a"
            f" multiple of {2 * model.num_heads}"
        )
    if model.num_heads % model.num_kv_heads:
        yield (
            f"{model.num_heads=}: cannot be divided evenly among {model.num_kv_heads=} key-value heads; use a multiple"
            f" of {model.num_kv_heads}"
        )


def _of_data(config: Sections) -> Iterator[str]:
    model, sft, rl, uses = config.model, config.sft, config.rl, {data.use for data in config.data}
    if config.run and not is_run_name(config.run):
        yield f"run={config.run!r}: a run name is a folder name: letters, digits, '.', '_' and '-', and no slash"
    if taken := {"messages", "add_generation_prompt"} & set(model.chat_template_args):
        yield (
            f"model.chat_template_args: rlpipe itself sets {min(taken)}; remove it (a system message is set with"
            " data.NAME.system_prompt)"
        )
    if sft.num_steps and "sft" not in uses:
        yield f"{sft.num_steps=}: no data set has use = 'sft'; add a [[data]] table, or set sft.num_steps = 0"
    if rl.num_iterations and not (rl.rollouts_from or "rl" in uses):
        yield f"{rl.num_iterations=}: no data set has use = 'rl'; add a [[data]] table, or set rl.num_iterations = 0"
    if not model.path and not uses & {"rl", "evaluation"}:
        yield f"{model.path=}: a new tokenizer is made of prompts; add a data set of use rl or evaluation"
    for (name, use), count in Counter((data.name, data.use) for data in config.data).items():
        if count > 1:
            yield (
                f"data.{name}.name={name!r}: {count} data sets of use {use} have this name, which is part of the names"
                " of their metrics; give each of them another name"
            )
    for data in config.data:
        if data.on_too_long == "drop" and rl.environment and data.use != "sft":
            yield (
                f"data.{data.name}.on_too_long='drop': rl.environment={rl.environment!r} writes its text when a prompt"
                " is drawn, and by then no row can be dropped; remove on_too_long, and keep the environment's text"
                " short enough"
            )
    fractions = {f"{data.heldout_fraction:g} of {data.name}" for data in config.data if data.part != "all"}
    if len({data.heldout_fraction for data in config.data if data.part != "all"}) > 1:
        yield (
            f"data.NAME.heldout_fraction: {', '.join(sorted(fractions))} differ, so one data set would train on"
            " prompts that another holds out; set the same fraction for all"
        )
    samples = bool(rl.num_iterations) or (config.sets("evaluation") and config.evaluation.completion_tokens_max is None)
    if samples and rl.completion_tokens_max >= model.context_tokens_max:
        yield (
            f"{model.context_tokens_max=}: leaves no room for a prompt beside {rl.completion_tokens_max=}; raise"
            " the first, or lower the second"
        )
    own = config.evaluation.completion_tokens_max if config.sets("evaluation") else None
    if own and own >= model.context_tokens_max:
        yield (
            f"{model.context_tokens_max=}: leaves no room for a prompt beside evaluation.completion_tokens_max={own};"
            " raise the first, or lower the second"
        )
    for name, part in (("sft", sft), ("rl", rl)):
        if part.schedule != "constant" and part.decay_steps <= part.warmup_steps:
            needs = f"decay_steps ({part.decay_steps}) above warmup_steps ({part.warmup_steps})"
            yield f"{name}.schedule={part.schedule!r}: needs {needs}"
    if sft.patience and not sft.validation_fraction:
        yield f"{sft.patience=}: waits for a better validation loss; set sft.validation_fraction above 0, to have one"


def _of_sampling(config: Sections) -> Iterator[str]:
    rl = config.rl
    if rl.agent and rl.environment:
        yield (
            f"{rl.agent=}: cannot be used with {rl.environment=}, because each of them runs the loop of a rollout;"
            " remove one of them"
        )
    if rl.agent and rl.oversampling > 1:
        yield (
            f"{rl.oversampling=}: oversampling continues a partial rollout in the next iteration, and by then its"
            " agent has ended; use oversampling = 1"
        )
    if rl.branches == "all" and not rl.agent:
        yield (
            f"{rl.branches=}: only the conversation of an agent has branches; set rl.agent, or use branches = 'last'"
        )
    if rl.branches == "all" and rl.rollouts_from:
        yield f"{rl.branches=}: {rl.rollouts_from=} gives rollouts without their branches; use branches = 'last'"
    if rl.environment_args and not rl.environment:
        yield "rl.environment_args: there is no environment to give them to; set rl.environment, or remove them"
    for name, rewards in (("rl", {} if rl.rollouts_from else rl.rewards), ("evaluation", config.evaluation.rewards)):
        if "environment" in rewards and not (rl.environment or rl.agent):
            yield (
                f"{name}.rewards: the reward 'environment' is given by an environment or an agent; set rl.environment"
                " or rl.agent"
            )
    if not rl.rewards and not (config.teachers and rl.teacher_coef):
        yield "rl.rewards is empty: name at least one, for example rewards = {math = 1.0}, or set rl.teacher"
    if rl.pass_rate_low > rl.pass_rate_high:
        yield f"{rl.pass_rate_low=}: is above {rl.pass_rate_high=}, and no prompt lies between them; lower it"


def _of_advantages(rl: RlConfig) -> Iterator[str]:
    in_groups = rl.estimator != "reinforce_plus_plus"
    if rl.group_size == 1 and in_groups:
        yield (
            f"{rl.group_size=}: estimator {rl.estimator} compares the rollouts of a group; use group_size of 2 or more,"
            " or estimator reinforce_plus_plus, which compares those of the whole batch"
        )
    if rl.group_size == 1 and "nonzero_std" in rl.filters:
        yield (
            f"{rl.group_size=}: the filter nonzero_std drops every group of one, whose rewards are equal; use filters ="
            " {}"
        )
    if rl.gamma < 1 and in_groups:
        yield (
            f"{rl.gamma=}: estimator {rl.estimator} gives all tokens of a rollout one advantage and discounts nothing; "
            "use gamma = 1, or estimator reinforce_plus_plus"
        )
    if rl.kl == "reward" and rl.estimator == "maxrl":
        yield (
            f"{rl.kl=}: estimator maxrl divides by the mean reward, which a KL can make negative; use kl = 'loss', or"
            " another estimator"
        )
    if rl.kl == "reward" and rl.estimator == "gdpo":
        yield f"{rl.kl=}: estimator gdpo compares each part of the rewards by itself, and a KL is none; use kl = 'loss'"
    if rl.kl == "none" and rl.kl_coef:
        yield (
            f"{rl.kl_coef=}: it is the weight of a KL that is not computed; set rl.kl to 'loss' or 'reward', or"
            " rl.kl_coef to 0"
        )
    if rl.kl == "none" and rl.reference:
        yield (
            f"{rl.reference=}: no KL to a reference is computed; set rl.kl (with rl.kl_coef = 0 the KL is only"
            " logged), or remove rl.reference"
        )


def _of_losses(rl: RlConfig) -> Iterator[str]:
    if rl.kl == "loss" and rl.kl_coef and rl.kl_estimator == "k1":
        yield (
            f"{rl.kl_estimator=}: its expected gradient is zero on-policy, so with kl = 'loss' the KL would not keep"
            " the policy near the reference; use k2 or k3, or kl = 'reward'"
        )
    if rl.dual_clip is not None and rl.objective not in ("ppo", "gspo"):
        yield (
            f"{rl.dual_clip=}: objective {rl.objective} does not use dual_clip; set dual_clip = none, or objective"
            " to ppo or gspo"
        )
    if rl.anchored and rl.importance != "none":
        by = "objective dppo" if rl.objective == "dppo" else f"{rl.proximal=}"
        yield (
            f"{rl.importance=}: with {by} the ratio already compares with the logprobs of the engine, and needs no"
            " further correction; use importance = 'none'"
        )
    if rl.proximal == "engine" and rl.objective == "reinforce":
        yield (
            f"{rl.proximal=}: objective reinforce has no ratio, so it uses no proximal logprobs; use proximal ="
            " 'trainer'"
        )
    if rl.proximal == "engine" and rl.rollouts_from:
        yield (
            f"{rl.proximal=}: no engine of this run sampled the rollouts of {rl.rollouts_from}, and they may have no"
            " recorded logprobs; use proximal = 'trainer'"
        )
    if rl.objective == "dppo" and rl.clip_high >= 1:
        yield (
            f"{rl.clip_high=}: objective dppo bounds a difference of probabilities, which is below 1; use clip_high"
            " below 1"
        )
    if rl.importance_low >= rl.importance_high:
        yield (
            f"{rl.importance_low=}: leaves no weight below {rl.importance_high=}; use importance_low below"
            " importance_high"
        )
    if rl.importance_low > 0 and not rl.importance.startswith("token"):
        yield (
            f"{rl.importance_low=}: importance {rl.importance} has no lower bound; use 0, or token_truncate or"
            " token_mask"
        )
    if rl.on_mismatch != "warn" and rl.off_policy:
        yield (
            f"{rl.on_mismatch=}: older policies sampled some of the tokens (oversampling above 1 with"
            " train_stale_tokens, rollouts_from, or overlap = 'iteration'), so the mismatch also contains the change"
            " of the policy, and is not checked; use on_mismatch = 'warn'"
        )


def _of_gate(config: Sections) -> Iterator[str]:
    evaluation = config.evaluation
    rules = evaluation.gate_at_least | evaluation.gate_at_most_below
    metrics = ["greedy", "reward_mean", *(f"pass_at_{k}" for k in powers_of_two(evaluation.num_completions))]
    known = [f"{data.name}_{metric}" for data in config.sets("evaluation") for metric in metrics]
    if bool(evaluation.gate_against) != bool(rules):
        yield f"{evaluation.gate_against=}: a gate needs gate_against and a rule, gate_at_most_below for example"
    if unknown := [metric for metric in rules if metric not in known]:
        yield f"evaluation.gate_*: no evaluation has {unknown[0]!r}; use one of {', '.join(known) or 'a data set'}"


def _of_teacher(config: Sections) -> Iterator[str]:
    rl, default = config.rl, type(config.rl).model_fields["teacher_coef"].default
    yield from _of_set_teachers(config)
    if not config.teachers:
        if rl.teacher_coef != default:
            yield f"{rl.teacher_coef=}: there is no teacher to weigh; set rl.teacher, or remove rl.teacher_coef"
        for name in ("teacher_top_k", "teacher_engine"):
            if value := getattr(rl, name):
                yield f"rl.{name}={value!r}: there is no teacher to ask; set rl.teacher, or remove rl.{name}"
        return
    yield from _of_teacher_engine(rl)
    if rl.teacher_top_k and config.trainer.context_ranks > 1:
        yield (
            f"{rl.teacher_top_k=}: a rank of a context-parallel group has the logits of its own slices only; use"
            " trainer.context_ranks = 1, or teacher_top_k = 0"
        )
    if not rl.is_weighed and "nonzero_std" in rl.filters:
        yield (
            f"{rl.filters=}: no reward has a weight, and the filter nonzero_std drops every group whose rewards are"
            " equal; use filters = {}"
        )
    if not rl.is_weighed and config.sets("evaluation") and not config.evaluation.rewards:
        yield (
            "evaluation.rewards is empty: evaluations score completions, and no reward in rl.rewards has a weight;"
            " name at least one, for example evaluation.rewards = {math = 1.0}, or remove the evaluation data sets"
        )


def _of_set_teachers(config: Sections) -> Iterator[str]:
    rl, sets = config.rl, config.sets("rl")
    for data in config.data:
        if data.teacher and data.name not in [one.name for one in sets]:
            yield f"data.{data.name}.teacher={data.teacher!r}: a teacher is of a set of use rl; remove it"
    own = [data.name for data in sets if data.teacher]
    if own and not rl.teacher and len(own) < len(sets):
        without = [data.name for data in sets if not data.teacher]
        yield f"rl.teacher is empty: it is the teacher of {', '.join(without)}, which have none of their own; name it"
    for name in ("teacher_engine", "rollouts_from"):
        if own and getattr(rl, name):
            why = "one engine serves one teacher" if name == "teacher_engine" else "stored rollouts are of other sets"
            yield f"data.{own[0]}.teacher: {why}; use rl.teacher alone, or leave rl.{name} out"


def _of_teacher_engine(rl: RlConfig) -> Iterator[str]:
    kind, _, url = rl.teacher_engine.partition(":")
    if not rl.teacher_engine:
        return
    if kind not in ENGINES or not url.startswith(("http://", "https://")):
        yield (
            f"{rl.teacher_engine=}: write it as KIND:URL, for example sglang:http://10.0.0.5:30000; kinds are"
            f" {', '.join(ENGINES)}"
        )
    if rl.temperature != 1:
        yield f"{rl.teacher_engine=}: engines score at temperature 1, and {rl.temperature=}; use 1, or leave it out"


def _of_stored_rollouts(config: Sections) -> Iterator[str]:
    rl, source = config.rl, config.rl.rollouts_from
    if source == "run:" or "://" in source:
        yield f"{rl.rollouts_from=}: use run:NAME, or a local path of a Parquet file or folder"
    if (path := config.model.path) == "run:" or (config.run and path == f"run:{config.run}"):
        yield f"model.path={path!r}: name another run, as run:NAME"
    for field, model in config.frozen_models.values():
        if model == "run:" or (config.run and model == f"run:{config.run}"):
            yield f"{field}={model!r}: name another run, as run:NAME"
    if config.run and source == f"run:{config.run}":
        yield f"{rl.rollouts_from=}: a run cannot train on its own rollouts; name another run"
    for name, value, neutral in (("oversampling", rl.oversampling, 1), ("curriculum", rl.curriculum, "none")):
        if source and value != neutral:
            yield (
                f"rl.{name}={value!r}: chooses what is sampled, and {rl.rollouts_from=} samples nothing; set {name} ="
                f" {neutral!r}"
            )
    if (
        source
        and "environment" in rl.rewards
        and not (rl.environment or rl.agent or config.evaluation.rewards)
        and config.sets("evaluation")
    ):
        yield (
            "rl.rewards: evaluations sample, and their reward 'environment' needs an environment; set rl.environment,"
            " or evaluation.rewards, or remove the evaluation data sets"
        )


def _of_places_and_limits(config: Sections) -> Iterator[str]:
    trainer, engines, stop, budget = config.trainer, config.engines, config.stop, config.budget
    for name, part in (("trainer", trainer), ("engines", engines)):
        if part.nodes > 1 and part.place == "process":
            yield f"{name}.nodes={part.nodes}: child processes are on one node; set {name}.place = 'deployment'"
    if engines.kind == "local" and engines.threads not in LOCAL_THREADS:
        yield (
            f"{engines.threads=}: choose one of {LOCAL_THREADS} for the local engine: results must not depend on the"
            " batch"
        )
    if stop.kl_max and config.rl.kl == "none":
        yield (
            f"{stop.kl_max=}: no KL to a reference is computed; set rl.kl (with rl.kl_coef = 0 it changes nothing), or"
            " use stop.proximal_kl_max"
        )
    for name, bound in (("gpu_h", budget.gpu_h), ("cost", budget.cost)):
        if bound and not (trainer.gpu_ids or engines.gpu_ids):
            yield (
                f"budget.{name}={bound}: no GPU is in trainer.gpu_ids or engines.gpu_ids, so no GPU hour is ever"
                " spent; use budget.wall_clock_h"
            )
    if budget.cost and not budget.price_per_gpu_h:
        yield f"{budget.cost=}: a GPU hour has no price, so nothing is ever spent; set budget.price_per_gpu_h"


def _of_what_is_kept(config: Sections) -> Iterator[str]:
    checkpoint = config.checkpoint
    if config.rl.overlap == "iteration" and checkpoint.keep_policies_last == 1:
        yield (
            f"{checkpoint.keep_policies_last=}: with rl.overlap='iteration' engines sample with the version before the"
            " newest, which must be kept, too; use 2 or more, or 0 for all"
        )
    if checkpoint.keep_policies_every and not checkpoint.keep_policies_last:
        yield (
            f"{checkpoint.keep_policies_every=}: has no effect, because {checkpoint.keep_policies_last=} keeps all"
            " policies; set keep_policies_last to 1 or more, or keep_policies_every to 0"
        )


def broken_layout(config: Sections) -> Iterator[str]:
    """Yields one line for each reason why trainer or engines cannot run in the configured place.

    Not for a stored config: its run may have ended, and its next start may use other places.
    """
    model, trainer, engines, scratch = config.model, config.trainer, config.engines, config.scratch
    if "://" in scratch:
        yield (
            f"{scratch=}: must be a folder on a disk of this machine, for example /fast/rlpipe; only the store may"
            " be on S3"
        )
    for name, gpu_ids in (("trainer", trainer.gpu_ids), ("engines", engines.gpu_ids)):
        if len({*gpu_ids}) < len(gpu_ids) or min(gpu_ids, default=0) < 0:
            yield f"{name}.{gpu_ids=}: these are numbers of a node's GPUs, from 0; name each once"
    if (num_gpus := len(trainer.gpu_ids)) and trainer.ranks != num_gpus:
        yield (
            f"{trainer.ranks=}: a rank has one GPU, and trainer.gpu_ids names {num_gpus}; set trainer.ranks ="
            f" {num_gpus}, or name others"
        )
    if engines.gpu_ids:
        yield from _of_engine_gpus(engines)
    yield from broken_transport(config)
    if engines.colocate:
        yield from broken_colocation(config)
    elif trainer.place == engines.place == "process" and (both := {*trainer.gpu_ids} & {*engines.gpu_ids}):
        yield (
            f"{engines.gpu_ids=}: {sorted(both)} are also in trainer.gpu_ids of the same machine, and the trainer"
            " keeps their memory while engines sample; give each GPU to one of the two, or set engines.colocate ="
            " true"
        )
    if (trainer.gpu_ids or engines.gpu_ids) and "dtype" not in model.model_fields_set:
        yield (
            f"model.dtype is not given: on GPUs {model.dtype} takes twice the memory of bfloat16 and several times its"
            " time; set model.dtype = 'bfloat16' (a run that has begun keeps what it has: 'float32' if it was never"
            " given)"
        )
    if trainer.ranks % trainer.context_ranks:
        fitting = [str(count) for count in range(2, trainer.ranks + 1) if trainer.ranks % count == 0]
        yield (
            f"{trainer.context_ranks=}: a context-parallel group is on one node, and {trainer.ranks=} cannot be"
            f" divided into groups of this size; set trainer.context_ranks to {' or '.join(['1', *fitting])}"
        )
    elif trainer.tokens_max * trainer.context_ranks < model.context_tokens_max:
        shared = f"is split over {trainer.context_ranks=} ranks" if trainer.context_ranks > 1 else "is never split"
        yield (
            f"{trainer.tokens_max=}: is too small; a sequence may have {model.context_tokens_max=} tokens, and"
            f" {shared}; set trainer.tokens_max = {-(-model.context_tokens_max // trainer.context_ranks)} or more, or"
            " raise trainer.context_ranks"
        )


def _of_engine_gpus(engines: EnginesConfig) -> Iterator[str]:
    num_gpus, (share, rest) = len(engines.gpu_ids), divmod(len(engines.gpu_ids), engines.count)
    if rest or not share:
        fitting = max(count for count in range(1, min(engines.count, num_gpus) + 1) if num_gpus % count == 0)
        yield (
            f"{engines.count=}: {num_gpus} GPUs in engines.gpu_ids are not shared evenly; set engines.count ="
            f" {fitting}, or name others"
        )
    elif engines.kind == "local" and share > 1:
        yield (
            f"{engines.count=}: the local engine runs on one GPU, and each would have {share}; set engines.count ="
            f" {num_gpus}"
        )
    elif (taken := _gpus_taken(engines.flags, share)) != share:
        yield (
            f"{engines.flags=}: with these flags an engine uses {taken} GPUs, and it has {share} ({num_gpus} in"
            f" engines.gpu_ids for {engines.count=}); remove such flags, and it uses all that it has"
        )


def _gpus_taken(flags: list[str], share: int) -> int:
    """The number of GPUs that an engine uses with the default `share` and these flags."""
    assert share > 0, "an engine without a GPU was refused before"
    words = [word for flag in flags for word in flag.split("=", 1)]
    tensor, pipeline, data = (
        next(
            (int(value) for name, value in reversed([*pairwise(words)]) if name in names and value.isdecimal()), default
        )
        for names, default in zip(PARALLEL_FLAGS, (share, 1, 1), strict=True)
    )
    return tensor * pipeline * (1 if "--enable-dp-attention" in flags else data)
