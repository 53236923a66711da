"""Secrets that a config names as Secret blocks of the Prefect server (docs/security.md).

Their values are read at each start, into the environment of the process that needs them, and kept
nowhere else. Prefect is imported only inside of the functions: commands use them.
"""

from __future__ import annotations

import asyncio
import os

from flows.printing import first_text
from rlpipe.base.errors import UserError
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.secrecy import named_blocks

INSTEAD = 'or name an environment variable in its place (key_env = "NAME", url = "$NAME")'


async def fill_secrets(config: PipelineConfig) -> None:
    """Puts the values of all Secret blocks that a config names into the environment; UserError
    where the server lacks one.
    """
    for block, variable in named_blocks(config.rl.reward_args).items():
        os.environ[variable] = await _value_of(block)


def read_secrets(config: PipelineConfig) -> None:
    """The same for a command, before it has a flow; UserError where no server is configured, or it
    does not answer.
    """
    if not (blocks := named_blocks(config.rl.reward_args)):
        return
    import httpx
    from prefect.exceptions import PrefectException
    from prefect.settings import PREFECT_API_URL

    from flows.outage import PrefectAway
    from rlpipe.store.patience import hurrying

    named = f"rl.reward_args: the Secret block {next(iter(blocks))!r}"
    if not PREFECT_API_URL.value():
        raise UserError(f"{named} is on a Prefect server: set PREFECT_API_URL, {INSTEAD}")
    try:
        with hurrying():
            asyncio.run(fill_secrets(config))
    except (PrefectException, httpx.HTTPError, PrefectAway, OSError) as error:
        raise UserError(f"{named} cannot be read: {first_text(error)}") from error


async def _value_of(block: str) -> str:
    from prefect.blocks.system import Secret

    try:
        secret = await Secret.aload(block)
    except ValueError as error:  # as Prefect says that there is none
        raise UserError(
            f"rl.reward_args: the Prefect server has no Secret block {block!r}; create it in the UI (Blocks), {INSTEAD}"
        ) from error
    value = secret.value.get_secret_value()  # `get` would read 4711 as a number
    if not value or not isinstance(value, str):
        raise UserError(f"rl.reward_args: the Secret block {block!r} holds no text; a key is one, {INSTEAD}")
    return value
