"""The session of a run, with Prefect's part: a name for the flow run, services as runs of
deployments, and waiting for another flow run that works on the same run. Its errors say what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable

from prefect import get_client, tags
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Running

import flows.outage  # and one whose server is away for a while
import flows.vanished  # noqa: F401  # a flow run that is deleted while it works goes on
from flows import PRESETS
from flows.blocks import fill_secrets
from flows.terminal import of_deployment
from flows.ui import only_shown
from rlpipe.base.errors import EngineError, StepRefused, StoreError, TrainerError, UserError
from rlpipe.base.manifests import StageResult
from rlpipe.base.references import ArtifactRef
from rlpipe.checks.preflight import passed_just_now, preflight
from rlpipe.config.pipeline import SET_TEACHER, PipelineConfig
from rlpipe.config.source import Changes, change_config
from rlpipe.loop import session as stages
from rlpipe.rewards.process import RewardLost
from rlpipe.store.backend import open_store
from rlpipe.store.commits import CommittedLate
from rlpipe.store.forks import way_to_change
from rlpipe.store.lease import RunHeld, TakenOver, announce, check_free, fenced, withdraw
from rlpipe.store.limits import reason_to_stop
from rlpipe.store.opening import OtherSettings, open_existing
from rlpipe.store.run import Run
from rlpipe.store.run_record import record_start
from rlpipe.stored.retired import withdraw_steps
from tasks.stages import (
    prepare_model,
    prepare_probe,
    prepare_reference,
    prepare_set_teacher,
    prepare_teacher,
    prepare_tokenizer,
    service_starter,
)

# longer than a run may take: a schedule that is always late shows as waiting flow runs
WAIT_MAX_S = 7 * 24 * 3600.0
POLL_S = 5.0
SLUG_CHARS_MAX = 40  # of a schedule's slug in a run's name, which has 80 at most
AGAIN = "then start the run again (in the UI: Retry): it goes on after the newest committed stage"
ADVICE: dict[type[Exception], str] = {  # the first that fits
    RunHeld: "",  # the errors of these five say it already
    TakenOver: "",
    CommittedLate: "",
    OtherSettings: "",
    StepRefused: "",
    UserError: (
        "In the UI, Retry starts it again with the same parameters. A field that may change (docs/config.md): start it"
        " anew under the same run name, in the UI with `changes`"
    ),
    StoreError: f"`rlpipe verify` lists every damaged file of a run; restore it, {AGAIN}",
    TrainerError: (
        "If the trainer's log ends without an error, the kernel killed it for memory: lower trainer.tokens_max, set "
        f"trainer.activation_checkpointing, or give it more memory. Mend the cause, {AGAIN}"
    ),
    EngineError: f"The engines' logs say why; mend the cause (memory: lower engines.in_flight_max), {AGAIN}",
    RewardLost: f"Mend the cause, {AGAIN}",
    OSError: f"The disk, the network or the store failed. Wait until it is back, {AGAIN}",
}


def run_name(flow: str) -> Callable[[], str]:
    """The name of a flow's run: the flow and the pipeline run."""

    def name() -> str:
        config, changes = flow_run.parameters["config"], flow_run.parameters.get("changes") or {}
        run = config.run if isinstance(config, PipelineConfig) else config.get("run", "")
        version = f" version {number}" if (number := flow_run.parameters.get("version")) is not None else ""
        return f"{flow} {changes.get('run') or run or own_name()}{version}"

    return name


def own_name() -> str:
    """The run name of a flow run that was given none: its schedule's slug (`scheduled` without one,
    `run` without a schedule), its scheduled start (UTC), the end of its id.

    Example: nightly-2026-11-22-0200-3fa2c1. All of it stays the same on Retry. The beginning of the
    id is not used: ids of scheduled flow runs are made in batches and begin with the time, so they
    begin alike night after night.
    """
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "called outside of a flow run"
    started, creator = context.flow_run.expected_start_time, context.flow_run.created_by
    assert started is not None, "the server sets it with the first state"
    slug = creator.display_value if creator is not None and creator.type == "SCHEDULE" else None
    slug = "scheduled" if slug and slug.endswith("Schedule") else slug  # Prefect names one without a slug by its class
    safe = re.sub(r"[^A-Za-z0-9]+", "-", slug or "run").strip("-")[:SLUG_CHARS_MAX] or "run"
    return f"{safe}-{started:%Y-%m-%d-%H%M}-{str(context.flow_run.id)[-6:]}"


async def requested(config: PipelineConfig, changes: Changes | None = None) -> PipelineConfig:
    """The config of a flow run, with its changes and a run name, checked before anything is
    written.

    UserError for all that is wrong with it. `preset` among the changes selects another preset
    instead of the config. A flow run without a run name (a schedule's) is named after itself. A
    flow inside another flow of rlpipe is not checked again.
    """
    config = change_config(config, changes, PRESETS) if changes else config
    config = config if config.run else config.model_copy(update={"run": own_name()})
    if not stages.is_open(config) and not passed_just_now(config):
        async with _advised(config):
            try:
                await asyncio.to_thread(check_free, open_store(config.store), f"runs/{config.run}")
            except RunHeld as held:
                _step_aside(held)
            await fill_secrets(config)
            await asyncio.to_thread(_checked, config)
    return config


def _step_aside(held: RunHeld | TakenOver) -> None:
    """Ends a second process of this flow run: Prefect leaves the state to the process that holds
    the run.
    """
    if held.flow_run == str(flow_run.id):
        raise Abort(f"another process works on this flow run: {held}") from held


def _checked(config: PipelineConfig) -> None:
    """Runs `preflight`, announced: services that wait for the run go on waiting meanwhile, and
    until the run is held.
    """
    store, root = open_store(config.store), f"runs/{config.run}"
    announce(store, root)
    with contextlib.ExitStack() as undo:
        undo.callback(withdraw, store, root)
        preflight(config)
        undo.pop_all()


@contextlib.asynccontextmanager
async def open_session(config: PipelineConfig) -> AsyncIterator[stages.Session]:
    """The session of a run, opened by the outermost flow, shared by those inside it. Its errors say
    what to do.

    A deployment's flow run waits, in a state `Waiting`, while another flow run holds the run;
    RunHeld after a week, and at once for a flow run without a deployment: its user is there to read
    it. A second process of one flow run (it was taken for dead, and started again) ends at once,
    and leaves the state of the flow run to the first.
    """
    async with _advised(config), contextlib.AsyncExitStack() as stack:
        stack.callback(withdraw, open_store(config.store), f"runs/{config.run}")  # for when the run cannot be held
        if not stages.is_open(config):
            await fill_secrets(config)
        # of the flow runs inside it, and of their tasks
        stack.enter_context(tags(await _tagged(config)))
        yield await _enter(stack, config)


@contextlib.asynccontextmanager
async def _advised(config: PipelineConfig) -> AsyncIterator[None]:
    """Adds advice on what to do to the errors raised in the body."""
    try:
        yield
    except tuple(ADVICE) as error:
        if isinstance(error, TakenOver):
            _step_aside(error)
        advised = await asyncio.to_thread(with_advice, error, config)
        if advised is error:
            raise
        raise advised from error


def with_advice(error: Exception, config: PipelineConfig) -> Exception:
    """The error with advice on what to do in its message; unchanged where there is nothing to add,
    or it was added already.
    """
    kind = next((kind for kind in ADVICE if isinstance(error, kind)), None)
    if kind is None or not ADVICE[kind] or ADVICE[kind] in str(error):
        return error
    return kind(f"{str(error).rstrip('.')}. {ADVICE[kind]}{_other_settings(config) if kind is UserError else ''}")


def _other_settings(config: PipelineConfig) -> str:
    """Text on how the run can go on with other settings, by its committed results; empty where it
    cannot be read.
    """
    with contextlib.suppress(UserError, StoreError, OSError):
        return f". Any other field: {way_to_change(open_existing(open_store(config.store), config.run))}"
    return ""


async def _tagged(config: PipelineConfig) -> str:
    """Gives this flow run the tag of its pipeline run, by which the UI finds all flow runs of it;
    returns the tag.
    """
    tag = f"run:{config.run}"
    if tag not in flow_run.tags:
        with only_shown():
            async with get_client() as client:
                await client.update_flow_run(flow_run.id, tags=[*flow_run.tags, tag])
    return tag


async def prepare(session: stages.Session) -> StageResult:
    """Records the start of the run; commits tokenizer, base model, reference and teachers unless
    they are committed; returns the tokenizer.
    """
    tokenizer = await begin_base(session)
    await prepare_base(session, tokenizer.ref)
    return tokenizer


async def begin_base(session: stages.Session) -> StageResult:
    """Records the start of the run; returns the tokenizer, which is committed."""
    await asyncio.to_thread(_keep_start, session.run)
    return await prepare_tokenizer(session)


async def prepare_base(session: stages.Session, tokenizer: ArtifactRef) -> None:
    """Commits the base model, the reference and the teachers, unless they are committed."""
    base = await prepare_model(session, tokenizer=tokenizer)
    if session.config.model.path:
        await prepare_probe(session, policy=base.ref)
    if session.config.rl.reference:
        await prepare_reference(session, tokenizer=tokenizer)
    if session.config.rl.teacher:
        await prepare_teacher(session, tokenizer=tokenizer)
    for stage in session.config.teachers[bool(session.config.rl.teacher) :]:
        await prepare_set_teacher(session, tag=stage.removeprefix(SET_TEACHER), tokenizer=tokenizer)


def _keep_start(run: Run) -> None:
    with fenced(run.lease):
        record_start(run.store, run.config)


async def begin_rl(session: stages.Session) -> int:
    """Prepares the phase; returns its first iteration that is not committed.

    UserError when the SFT before it is not complete.
    """
    run = session.run
    session.tracker.begin("rl")
    if not await asyncio.to_thread(lambda: session.progress.sft_complete):
        raise UserError(
            f"the SFT of run {run.name} is not complete: start post-train or sft first, or set sft.num_steps = 0"
        )
    await prepare(session)
    if withdrawn := await asyncio.to_thread(withdraw_steps, run):
        get_run_logger().warning(
            "rl.overlap='steps' is 'none' now: what it left of an unfinished iteration is made again (%d artifacts)",
            len(withdrawn),
        )
    session.retention.prune()
    return await asyncio.to_thread(session.progress.num_done, "rl")


async def reason_to_end(session: stages.Session, phase: str, num_committed: int) -> str:
    """The reason not to go on with a phase after so many segments or iterations; empty when it goes
    on, or is complete.
    """
    return await asyncio.to_thread(reason_to_stop, session.run, phase, num_committed)


async def _enter(stack: contextlib.AsyncExitStack, config: PipelineConfig) -> stages.Session:
    deadline, has_waited, may_wait = time.monotonic() + WAIT_MAX_S, False, of_deployment()
    while True:
        try:
            opened = stages.open_session(config, service_starter(config), str(flow_run.id))
            session = await stack.enter_async_context(opened)
            if has_waited:
                await _show("Running", "the run is free")
            return session
        except RunHeld as held:
            _step_aside(held)
            if not may_wait or time.monotonic() > deadline:
                raise
            if not has_waited:
                await _show("Waiting", str(held))
            has_waited = True
        await asyncio.sleep(POLL_S)


async def _show(name: str, message: str) -> None:
    """Sets the name and message of this flow run's state, for display only: a process that cannot
    reach the server waits all the same.
    """
    get_run_logger().info("%s: %s", name, message)
    with only_shown():
        async with get_client() as client:
            await client.set_flow_run_state(
                flow_run.id,
                Running(name=name, message=message),  # pyright: ignore[reportArgumentType]
                force=True,
            )
