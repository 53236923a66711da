"""The kinds of engines: everything that differs between SGLang, which is in the core, and the kinds
that are extras.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import aiohttp

from rlpipe.config.extras import ENGINES, opened
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.engines.client import EngineClient
from rlpipe.engines.weights import Weights


class EngineKind(ABC):
    """One kind of engine.

    `package`: the package that the interpreter `engines.python` must have; empty for rlpipe's own
    engine, which runs in this interpreter. `loads_adapters`: the engine can load an adapter onto
    its base.
    """

    package: ClassVar[str]
    loads_adapters: ClassVar[bool]

    @abstractmethod
    def client(self, name: str, url: str, session: aiohttp.ClientSession, keys: tuple[str, str]) -> EngineClient:
        """The client that speaks its protocol. `keys`: the API key and the admin key."""

    @abstractmethod
    def argv(self, config: PipelineConfig, weights: Weights, listen: list[str]) -> list[str]:
        """The command that starts an engine on `weights`; `listen`: the flags of its address."""

    def variables(self, config: PipelineConfig, api_key: str) -> dict[str, str]:
        """The environment variables that it needs, in addition to those of every engine."""
        return {}

    def readable(self, folder: Path) -> Path:
        """The folder from which this kind reads the policy in `folder`; may be another one."""
        return folder


def kind_of(name: str) -> EngineKind:
    """The kind with the name `engines.kind`. UserError when this installation lacks its extra."""
    return opened(ENGINES[name], f"engines.kind={name!r}")
