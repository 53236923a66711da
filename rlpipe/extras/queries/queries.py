"""SQL over all runs of a store (`rlpipe sql`): the committed artifacts as views of DuckDB
(docs/queries.md has their columns).

pyarrow reads the Parquet files, DuckDB requests columns and rows from it: so `s3://` needs no
extension, and DuckDB itself opens no file at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from rlpipe.base.errors import StoreError, UserError
from rlpipe.extras.queries.catalogue import Catalogue
from rlpipe.extras.queries.tables import Tables
from rlpipe.records.prompt import is_text
from rlpipe.store.backend import Store

FETCHED = 10_000  # rows at a time
UNREADABLE = re.compile(r"reading the stream registered as '_\w+' failed: (.*)")
SETTINGS: dict[str, Any] = {
    "python_enable_replacements": False,  # else a query reads the variables of this process
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "temp_directory": "",  # else what does not fit in memory is written to the working directory
}
NUM_TOKENS = "cast(list_sum(list_transform(weight_versions, lambda span: span.num_tokens)) as integer) as num_tokens"
SCORED = """reward, cast(nullif(reward_parts, '') as json)::map(varchar, double) as reward_parts,
            nullif(reward_fault, '') as reward_fault"""
ENVIRONMENT = "cast(nullif(environment, '') as json) as environment"


@dataclass(frozen=True)
class View:
    """A view: its SQL, and its sources (rlpipe/extras/queries/tables.py)."""

    sql: str
    sources: tuple[str, ...]


VIEWS = {
    "runs": View("select * replace (config::json as config) from _runs", ("_runs",)),
    "iterations": View("from _iterations", ("_iterations",)),
    "prompts": View(
        """select run, iteration, round, prompt_id, source, messages::json as messages, answer,
            cast(nullif(metadata, '') as json) as metadata, """
        """cast(len(prompt_tokens) as integer) as num_tokens, prompt_tokens
        from _prompts""",
        ("_prompts",),
    ),
    "rollouts": View(
        f"""select r.run, r.iteration, r.round, r.group_index, r.rollout_index, r.prompt_id, r.made_by, """
        f"""r.prompt, r.completion,
            cast(len(r.prompt_tokens) as integer) as num_prompt_tokens, {NUM_TOKENS}, """
        f"""r.finish_reason, r.weight_version, {SCORED},
            case when r.filtered then b.advantage is not null end as trained, b.advantage, d.reason as dropped_reason,
            r.seed, r.engine, {ENVIRONMENT}, r.weight_versions, r.prompt_tokens, r.completion_tokens, """
        """r.loss_mask, r.rollout_logprobs
        from _rollouts r
        left join _batch b on r.run = b.run and r.iteration = b.iteration and r.group_index = b.group_index
            and r.rollout_index = b.rollout_index
        left join _dropped d on r.run = d.run and r.iteration = d.iteration and r.group_index = d.group_index""",
        ("_rollouts", "_batch", "_dropped"),
    ),
    "scores": View(
        f"""select run, iteration, round, group_index, rollout_index, prompt_id, {SCORED}, {NUM_TOKENS}, """
        """finish_reason, weight_version
        from _rollouts where reward is not null""",
        ("_rollouts",),
    ),
    "gaps": View("select run, iteration, group_index, rollout_index, gap from _gaps", ("_gaps",)),
    "evaluations": View("from _evaluations", ("_evaluations",)),
    "evaluation_rollouts": View(
        f"""select run, evaluated_version as weight_version, group_index, rollout_index, prompt_id, prompt, """
        f"""completion, {NUM_TOKENS},
            finish_reason, {SCORED}, {ENVIRONMENT}, completion_tokens, rollout_logprobs
        from _evaluation_rollouts""",
        ("_evaluation_rollouts",),
    ),
    "artifacts": View("select * replace (metrics::json as metrics) from _artifacts", ("_artifacts",)),
}


@dataclass(frozen=True)
class Answer:
    """The columns of a query, with their types in DuckDB, and its rows, which can be read once."""

    columns: list[str]
    types: list[str]
    rows: Iterator[tuple[Any, ...]]


class Queries:
    """The views of a store. `faults`: damaged files that were left out."""

    def __init__(self, store: Store, names: Sequence[str] = ()) -> None:
        """Takes all runs of the store, or those called `names`; UserError when one does not
        exist.
        """
        self._store, self._catalogue = store, Catalogue(store, names)
        self._tables = Tables(self._catalogue)

    @property
    def faults(self) -> list[str]:
        return self._catalogue.faults

    def ask(self, sql: str) -> Answer:
        """The answer of one SELECT, DESCRIBE, SHOW or EXPLAIN; UserError with DuckDB's reason for
        another statement, or a faulty one.

        It can neither write nor read a file: DuckDB has no access to any, and its settings are
        locked.
        """
        if not is_text(sql):
            raise UserError(
                f"{sql!r:.200}: the query has half of a surrogate pair, or bytes that are no UTF-8: no text of a store"
                " has them"
            )
        connection = duckdb.connect(":memory:", config=SETTINGS)
        try:
            statements = connection.extract_statements(sql)
            kinds = [statement.type for statement in statements]
            if len(kinds) != 1 or kinds[0] not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
                raise UserError(f"{sql!r:.200}: one query that reads, please: SELECT, DESCRIBE, SHOW TABLES or EXPLAIN")
            self._create_views(connection, sql)
            connection.execute("set enable_external_access = false; set lock_configuration = true")
            result = connection.execute(statements[0])
        except duckdb.Error as error:
            raise _fault(error) from error
        described = result.description or []
        return Answer([entry[0] for entry in described], [str(entry[1]) for entry in described], self._rows(result))

    def _create_views(self, connection: duckdb.DuckDBPyConnection, sql: str) -> None:
        """Creates the views that the query may name. They are found by its words, not by its
        tables: a name in a text that is run as SQL counts too.
        """
        words = set(re.findall(r"\w+", sql.lower()))
        named = {name: view for name, view in VIEWS.items() if name in words or words & set(view.sources)} or VIEWS
        for source in dict.fromkeys(source for view in named.values() for source in view.sources):
            connection.register(source, self._tables.source(source))
        for name, view in named.items():
            connection.execute(f"create view {name} as {view.sql}")

    def _rows(self, result: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
        try:
            while rows := result.fetchmany(FETCHED):
                yield from rows
        except duckdb.Error as error:
            raise _fault(error) from error
        finally:
            result.close()


def _fault(error: duckdb.Error) -> UserError | StoreError:
    """The error with DuckDB's message on one line, without the place in the query. StoreError where
    pyarrow could not read a file of the store."""
    text = " ".join(str(error).partition("\n\nLINE ")[0].split())
    if match := UNREADABLE.search(text):
        return StoreError(f"{match[1]}; `rlpipe verify RUN` names what is damaged, and --run leaves other runs out")
    return UserError(text)
