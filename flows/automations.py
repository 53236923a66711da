"""The automations of unattended nights, from `automations.yaml` to a Prefect server. Applied again, they are updated, not doubled."""

from __future__ import annotations

from pathlib import Path

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from rlpipe.types import UserError

FILE = Path(__file__).parent / "automations.yaml"
BLOCK = "{notify}"


async def apply_automations(notify: str) -> list[str]:
    """Creates or updates the automations on the server; one line each of what was done.

    `notify`: the notification block as TYPE/NAME (for example slack-webhook/team); empty leaves out what needs one. UserError
    when there is no such block.
    """
    lines = []
    async with get_client() as client:
        block = await _block_id(client, notify) if notify else ""
        for entry in yaml.safe_load(FILE.read_text())["automations"]:
            if any(action.get("block_document_id") == BLOCK for action in entry["actions"]):
                if not block:
                    lines.append(f"left out {entry['name']}: name a notification block with --notify TYPE/NAME")
                    continue
                entry["actions"] = [{**action, "block_document_id": block} for action in entry["actions"]]
            lines.append(await _apply(client, AutomationCore.model_validate(entry)))
    return lines


async def _apply(client: PrefectClient, automation: AutomationCore) -> str:
    standing = await client.read_automations_by_name(automation.name)
    if not standing:
        await client.create_automation(automation)
        return f"created {automation.name}"
    await client.update_automation(standing[0].id, automation)
    return f"updated {automation.name}"


async def _block_id(client: PrefectClient, notify: str) -> str:
    kind, _, name = notify.partition("/")
    try:
        return str((await client.read_block_document_by_name(name, kind)).id)
    except ObjectNotFound as error:
        raise UserError(
            f"--notify {notify}: the server has no such block; create one in the UI (Blocks), and name it as TYPE/NAME, "
            "for example slack-webhook/team"
        ) from error
