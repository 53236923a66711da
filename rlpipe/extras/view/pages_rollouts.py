"""The pages over prompts, groups and rollouts, of iterations and of evaluations alike."""

from __future__ import annotations

import numpy as np
from starlette.datastructures import QueryParams

from rlpipe.base.errors import StoreError, UserError
from rlpipe.extras.view.groups import (
    FATES,
    GroupFiles,
    GroupLine,
    ShownRollout,
    beside,
    evaluation_groups,
    iteration_groups,
    scored_files,
)
from rlpipe.extras.view.library import Library
from rlpipe.extras.view.pages import Page, Place, choice, number_of, part_of
from rlpipe.extras.view.plots import curve, plot
from rlpipe.extras.view.search import newest_first, prompt_in_evaluations, prompt_in_iterations, search
from rlpipe.extras.view.tokens import ShownToken, shown_tokens
from rlpipe.records.prompt import Messages
from rlpipe.records.turns import answers_of, speakers
from rlpipe.report.stored_turns import stored_tokenizer
from rlpipe.store.run import Run
from rlpipe.store.run_record import run_names

ORDERS = {
    "group": lambda line: line.group_index,
    "best": lambda line: -(line.mean if line.mean is not None else float("-inf")),
    "worst": lambda line: line.mean if line.mean is not None else float("inf"),
    "spread": lambda line: -line.spread,
}
AXES = {"iterations": "iteration", "evaluations": "weight version"}
COLOURS = ("logprob", "gap", "mask", "version", "none")


def files_of(library: Library, place: Place) -> GroupFiles:
    """The groups that an address names: of an iteration, or of an evaluation."""
    text = place["number"]
    if not text.removeprefix("-").isdecimal() or len(text) > 9:
        raise UserError(f"{text[:40]!r} is no number of an iteration or of a weight version")
    run, number = library.run(place["run"]), int(text)
    if place["kind"] == "evaluations":
        return evaluation_groups(library, run, number)
    if number < 0:
        raise UserError(f"iteration {number}: they are numbered from 0")
    return iteration_groups(library, run, number)


def groups_page(library: Library, place: Place, query: QueryParams) -> Page:
    """The groups of an iteration, or of an evaluation."""
    files = files_of(library, place)
    lines, text, number = files.groups(), query.get("text") or "", files.number
    fate, order = choice(query, "fate", ("all", *FATES)), choice(query, "order", tuple(ORDERS))
    record = files.run.iteration(number) if files.place == "iterations" else None
    values = {
        "run": files.run,
        "files": files,
        "record": record,
        "lines": lines,
        "fate": fate,
        "order": order,
        "text": text,
        "table": part_of(sorted((line for line in lines if _matches(line, fate, text)), key=ORDERS[order]), query),
        "before": number - 1 if files.place == "iterations" and number else None,
        "after": number + 1 if record and scored_files(files.run, number + 1) else None,
    }
    return Page("groups.html", values)


def _matches(line: GroupLine, fate: str, text: str) -> bool:
    return fate in ("all", line.fate) and text.casefold() in f"{line.prompt_id}\n{line.prompt}".casefold()


def group_page(library: Library, place: Place, _query: QueryParams) -> Page:
    """One group: its prompt, and every rollout with its reward and the parts of it."""
    files, group = files_of(library, place), place["group"]
    rollouts = files.rollouts(group)
    parts = sorted({name for rollout in rollouts for name in rollout.reward_parts or {}})
    values = {
        "run": files.run,
        "files": files,
        "group": group,
        "fate": files.fate(group),
        "rollouts": rollouts,
        "parts": parts,
    }
    values |= {"trained": files.trained(group), "steps": files.neighbours(group), "turns": files.turns(group)}
    return Page("group.html", values)


def rollout_page(library: Library, place: Place, query: QueryParams) -> Page:
    """One rollout token by token."""
    files, group, index = files_of(library, place), place["group"], place["rollout"]
    rollout, trained = files.rollout(group, index), files.trained(group).get(index)
    tokens, prompt, fault = list[ShownToken](), rollout.prompt, ""
    gaps, by_agent = files.gaps(group).get(index, np.zeros(0)), bool(files.sampled_by.config.rl.agent)
    try:
        tokenizer = stored_tokenizer(files.run)
        mask = (trained or rollout).loss_mask.tolist()
        tokens = shown_tokens(rollout, mask, tokenizer, gaps if trained else (), speakers(rollout, by_agent))
        prompt = tokenizer.decode(rollout.prompt_tokens.tolist(), skip_special_tokens=False)
    except StoreError as error:  # the texts are there all the same
        fault = str(error)
    values = {
        "run": files.run,
        "files": files,
        "group": group,
        "rollout": rollout,
        "trained": trained,
        "fate": files.fate(group),
        "prompt": prompt,
        "tokens": tokens,
        "answers": answers_of(rollout, by_agent),
        "fault": fault,
        "colour": choice(query, "colour", COLOURS),
        "versions": {
            version: at for at, version in enumerate(sorted({span.version for span in rollout.weight_versions}))
        },
        "gaps": np.abs(gaps[np.isfinite(gaps)].astype(float)).tolist(),
        "no_gap": _no_gap(files, bool(trained)),
        "logprobs": [token.logprob for token in tokens if token.logprob is not None],
        "steps": beside(index, {other.rollout_index for other in files.rollouts(group)}),
    }
    return Page("rollout.html", values)


def _no_gap(files: GroupFiles, trained: bool) -> str:
    """The reason why no gap is stored for a rollout that has none."""
    if not trained:
        return "the trainer never had this rollout: it is in no batch"
    if files.gap is None and files.run.iteration(files.number) is None:
        return "the iteration is not trained yet"
    if files.gap is None:
        return f"iteration {files.number} has none stored: an older version of rlpipe trained it"
    if files.run.owner("rl", files.number).config.rl.proximal == "engine":
        return (
            "its step was not the first, and rl.proximal='engine' makes no pass by the weights of the start; or no"
            " token was trained"
        )
    return "nobody recorded the engine's logprobs, or no token was trained"


def prompt_page(library: Library, place: Place, query: QueryParams) -> Page:
    """The same prompt through the iterations, or through the evaluations."""
    run, prompt_id = library.run(place["run"]), query.get("id") or ""
    start = number_of(query, "from", 0) if query.get("from") else None
    looked = prompt_in_iterations(library, newest_first(run, start), prompt_id)
    evaluated = [] if looked.results or looked.rest else prompt_in_evaluations(library, run, prompt_id)
    answers, kind = (evaluated, "evaluations") if evaluated else (looked.results, "iterations")
    if not (answers or looked.rest or looked.faults):
        raise UserError(f"no rollout of run {run.name} has the prompt {prompt_id[:200]!r}")
    points = [(answer.number, float(np.mean(answer.rewards))) for answer in reversed(answers) if answer.rewards]
    drawn = plot("mean reward of the prompt", AXES[kind], [curve(prompt_id, points, f"/runs/{run.name}/{kind}/")])
    groups_of = evaluation_groups if evaluated else iteration_groups

    def turns(number: int, rollout: ShownRollout) -> Messages | None:
        return groups_of(library, run, number).turns_of(rollout) if rollout.has_turns else None

    values = {"run": run, "prompt_id": prompt_id, "kind": kind, "answers": answers, "looked": looked, "turns": turns}
    return Page("prompt.html", values | {"plots": [drawn] if answers else []})


def search_page(library: Library, _place: Place, query: QueryParams) -> Page:
    """Rollouts with a text, of one run or of all, for a bounded time; the page says where the
    search goes on.
    """
    text, name = (query.get("text") or "").strip(), query.get("run") or ""
    names = run_names(library.store)
    places, faults = _places(library, query, [name] if name else names)
    searched = search(library, places, text) if text else None
    return Page("search.html", {"text": text, "run_name": name, "names": names, "searched": searched, "faults": faults})


def _places(library: Library, query: QueryParams, names: list[str]) -> tuple[list[tuple[Run, int]], list[str]]:
    """The iterations that a search reads, run after run from the one that `from` names (a/12); and
    the reasons why runs cannot be read.
    """
    run_from, _, number = (query.get("from") or "").partition("/")
    if run_from and (not number.isdecimal() or len(number) > 9 or run_from not in names):
        raise UserError(f"from={str(query.get('from'))[:40]!r}: a run and an iteration, please: a/12")
    places, faults = list[tuple[Run, int]](), list[str]()
    for name in names[names.index(run_from) if run_from else 0 :]:
        try:
            places += newest_first(library.run(name), int(number) if name == run_from else None)
        except (UserError, StoreError) as error:  # of another version, or damaged
            faults.append(str(error))
    return places, faults
