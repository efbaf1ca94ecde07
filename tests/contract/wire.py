"""SGLang's HTTP as it is: every answer comes back unchecked, with nothing of the product in between."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx

from tasks.engines.server import SGLangServer

BEGUN = 12  # tokens of a request, prompt included, after which it is called running


class Wire:
    """The two keys of one server, and requests in the background."""

    def __init__(self, server: SGLangServer) -> None:
        self.port = server._port
        self.user = {"Authorization": f"Bearer {server._api_key}"}
        self.admin = {"Authorization": f"Bearer {server._admin_key}"}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120, trust_env=False)
        self._threads = ThreadPoolExecutor()

    def close(self) -> None:
        self._threads.shutdown()
        self.http.close()

    def ask(self, path: str) -> Any:
        return self.http.get(path, headers=self.user).raise_for_status().json()

    def command(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(path, json=body, headers=self.admin)

    def generate(self, ids: Sequence[int], tokens: int = 8, sampling: Any = None, **more: Any) -> httpx.Response:
        """Exactly `tokens` new ones at temperature 1, unless `sampling` says otherwise."""
        parameters = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, **(sampling or {})}
        body = {"input_ids": list(ids), "sampling_params": parameters, "return_logprob": True, **more}
        return self.http.post("/generate", json=body, headers=self.user)

    def start(self, ids: Sequence[int], tokens: int = 8, **more: Any) -> Future[httpx.Response]:
        return self._threads.submit(self.generate, ids, tokens, **more)

    def load(self, folder: Path, label: str, **more: Any) -> httpx.Response:
        return self.command("/update_weights_from_disk", {"model_path": str(folder), "weight_version": label, **more})

    def label(self) -> str:
        return str(self.ask("/model_info")["weight_version"])

    def sums(self) -> dict[str, str]:
        """Tensor -> checksum, of the only rank."""
        (rank,) = self.command("/weights_checker", {"action": "checksum"}).raise_for_status().json()["ranks"]
        return dict(rank["checksums"])

    def loads(self) -> dict[str, Any]:
        (load,) = self.ask("/v1/loads")["loads"]
        return dict(load)

    def pause_in_the_middle(
        self, mode: Literal["abort", "retract", "in_place"], ids: Sequence[int], tokens: int, **more: Any
    ) -> Future[httpx.Response]:
        """A request that the pause found running. One that ended before is sent again: on a busy machine it may."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            answer = self.start(ids, tokens, **more)
            while self.loads()["num_used_tokens"] < BEGUN and not answer.done():
                pass
            self.command("/pause_generation", {"mode": mode}).raise_for_status()
            if mode == "abort":
                if "abort" in answer.result().text:
                    return answer
            elif self.command("/flush_cache?timeout=0.05").status_code == 400:  # nothing but a request keeps it waiting
                return answer
            self.command("/continue_generation", {}).raise_for_status()
            answer.result()
        raise TimeoutError(f"no pause met one of {tokens} tokens")
