"""One engine over SGLang's HTTP protocol. Every call has a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aiohttp

from rlpipe.types import EngineError, JsonDict

CONTROL_TIMEOUT_S = 120.0
INFO_TIMEOUT_S = 5.0


class EngineUnavailable(EngineError):
    """The engine is gone, hung or answers 5xx: the same request may go to another engine."""


class RequestRefused(EngineError):
    """The engine answered 4xx: the same request would be refused anywhere."""


@dataclass(frozen=True)
class EngineClient:
    """Calls to one engine. Control calls carry the admin key, /generate the API key, as SGLang wants with both set."""

    url: str
    session: aiohttp.ClientSession
    api_key: str
    admin_api_key: str

    async def generate(self, body: JsonDict, timeout_s: float) -> list[JsonDict]:
        """The answers of one (batched) request, in order."""
        answer = await self._call("POST", "/generate", self.api_key, body, timeout_s)
        return answer if isinstance(answer, list) else [answer]

    async def model_info(self) -> JsonDict:
        return await self._call("GET", "/model_info", self.api_key, None, INFO_TIMEOUT_S)

    async def healthy(self) -> bool:
        try:
            await self._call("GET", "/health", self.api_key, None, INFO_TIMEOUT_S)
        except EngineError:
            return False
        return True

    async def pause(self, mode: str) -> None:
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._control("/continue_generation", {})

    async def update_weights(self, model_path: str, version: int) -> None:
        """RequestRefused (the old weights keep serving) when the engine cannot load the folder."""
        answer = await self._control(
            "/update_weights_from_disk",
            {"model_path": model_path, "weight_version": str(version), "flush_cache": True},
        )
        if not answer.get("success", False):
            raise RequestRefused(f"{self.url} refused {model_path}: {answer.get('message')}")

    async def weight_version(self) -> int:
        return int((await self.model_info())["weight_version"])

    async def _control(self, path: str, body: JsonDict) -> JsonDict:
        return await self._call("POST", path, self.admin_api_key, body, CONTROL_TIMEOUT_S)

    async def _call(self, method: str, path: str, key: str, body: JsonDict | None, timeout_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with self.session.request(method, self.url + path, json=body, headers=headers, timeout=timeout) as answer:
                if answer.status >= 500:
                    raise EngineUnavailable(f"{self.url}{path} answered {answer.status}: {(await answer.text())[:300]}")
                if answer.status >= 400:
                    raise RequestRefused(f"{self.url}{path} answered {answer.status}: {(await answer.text())[:1000]}")
                return await answer.json() if answer.content_type == "application/json" else {"success": True}
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise EngineUnavailable(f"{self.url}{path}: {type(error).__name__} {error}") from error
