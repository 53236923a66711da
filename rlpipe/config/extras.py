"""The entry points of the extras (whole capabilities that a run may do without), by the command or
config value that selects one.

An extra imports the core. The core imports an extra only through this table, so an installation
without `rlpipe/extras`, or without the packages of an extra, can do everything else.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from rlpipe.base.errors import UserError

ROOM = "rlpipe.extras"


class Extra(NamedTuple):
    """The entry point of an extra. `name`: module:attribute. `packages`: that it needs in addition
    to the core's; `install`: their name in the optional dependencies of rlpipe.
    """

    name: str
    install: str = ""
    packages: tuple[str, ...] = ()


VIEW = ("view", ("starlette", "uvicorn", "plotly"))
QUERIES = ("queries", ("duckdb",))
GATE = ("gate", ("scipy",))
WHY = ("why", ("scipy",))
COMMANDS = {
    "plan": Extra(f"{ROOM}.plan.report:plan_report"),
    "view": Extra(f"{ROOM}.view.server:serve_view", *VIEW),
    "sql": Extra(f"{ROOM}.queries.command:answer", *QUERIES),
    "compare": Extra(f"{ROOM}.compare.report:compare_report"),
    "gate": Extra(f"{ROOM}.gate.command:judge_stored", *GATE),
    "gate of a run": Extra(f"{ROOM}.gate.command:judge", *GATE),
    "promote": Extra(f"{ROOM}.gate.promotion:promote", *GATE),
    "rollback": Extra(f"{ROOM}.gate.promotion:roll_back", *GATE),
    "why": Extra(f"{ROOM}.why.command:explain", *WHY),
    "search": Extra(f"{ROOM}.search.halving:Search"),
    "search --explore": Extra(f"{ROOM}.search.population:Population"),
    "search in progress": Extra(f"{ROOM}.search.course:Course"),
    "export": Extra(f"{ROOM}.serve.card:write_card"),
    "serve": Extra(f"{ROOM}.serve.server:serve_policy"),
    "chat": Extra(f"{ROOM}.serve.talk:talk"),
    "why --second": Extra(f"{ROOM}.why.command:compare_rewards", *WHY),
}
ENGINES = {  # SGLang is in the core
    "sglang": Extra("rlpipe.engines.sglang:SGLANG"),
    "local": Extra(f"{ROOM}.local_engine.kind:LOCAL"),
    "vllm": Extra(f"{ROOM}.vllm.kind:VLLM"),
}
# by command, the module that it runs
SERVERS = {"engine": Extra(f"{ROOM}.local_engine.kind:SERVER")}
# by the field of the section rl that names what is played
PLAYERS = {
    "environment": Extra(f"{ROOM}.environments.player:ENVIRONMENT"),
    "agent": Extra(f"{ROOM}.agents.player:AGENT"),
}
# what `rl.rollouts_from` needs
IMPORTS = {
    "check": Extra(f"{ROOM}.imports.checking:check_source"),
    "prompts": Extra(f"{ROOM}.imports.importing:import_prompts"),
    "rollouts": Extra(f"{ROOM}.imports.importing:import_rollouts"),
}
# modules that were in the core, by the names that configs of runs have for them
MOVED = {"rlpipe.environments.calculator": f"{ROOM}.environments.calculator"}
TEACHER = Extra(f"{ROOM}.teacher_engine.asking:ask")  # for rl.teacher_engine
# by how the name of a data set's source begins, the function that gives its rows
SOURCES = {"run:": f"{ROOM}.samples.rows:chosen"}
REWARDS = {"code": Extra(f"{ROOM}.code_sandbox.code:CODE")}


def opened(extra: Extra, wanted: str) -> Any:
    """Imports and returns the attribute of an extra. `wanted`: the command or setting that needs
    it, in the user's words.

    UserError when this installation lacks the extra, or a package that it needs.
    """
    module, _, attribute = extra.name.partition(":")
    try:
        room = importlib.import_module(module)
        for package in extra.packages:  # including packages that it imports only later
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing in extra.packages:
            raise UserError(
                f"{wanted}: needs the package {missing}, which is not installed; in a checkout of rlpipe:"
                f" pip install -c constraints.txt -e '.[{extra.install}]'"
            ) from error
        if missing == ROOM or missing.startswith(f"{ROOM}."):
            raise UserError(
                f"{wanted}: this installation of rlpipe has no {missing}; install the whole package"
            ) from error
        raise
    return getattr(room, attribute)
