"""The task reload_engines."""

from rlpipe.stages import policy
from tasks.stage_task import stage_task

reload_engines = stage_task("reload_engines", "reload_engines to version {version}")(policy.reload_engines)
