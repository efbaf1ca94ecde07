"""An engine without a server: its requests end when, and as, the test says. For orders that no server can be made to
take."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tasks.engines.client import Aborted, Engine, Generation, Mark, Sampling, Span

BOOT = "boot-0000000000000001"


@dataclass
class Asked:
    """A request that waits for its end."""

    rid: str
    prompt_ids: list[int]
    label: str
    answer: asyncio.Future[Generation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def group(self) -> str:
        return self.rid[:12]  # i000001-g000

    def tokens(self, *ids: int, finish: str = "stop") -> Generation:
        spans = (Span(self.label, 0, len(ids)),) if ids else ()
        return Generation(ids, (-0.5,) * len(ids), spans, finish, 0)

    def end(self, *ids: int, finish: str = "stop") -> None:
        self.answer.set_result(self.tokens(*ids, finish=finish))

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)


class Puppet(Engine):
    """`asked` are the requests under way, in the order they came; `partial` is what an aborted one had."""

    def __init__(self, name: str = "engine0", boot: str = BOOT) -> None:
        super().__init__(name, "http://127.0.0.1:9", vocab_size=1000, context_length=2048, boot=boot)
        self.asked: list[Asked] = []
        self.sent: list[str] = []
        self.aborted: list[str] = []
        self.partial: tuple[int, ...] = (7,)
        self.alive = True

    async def mark(self) -> Mark:
        return Mark(await self.current_boot(), self.ready_label, "c0ffee")

    async def current_boot(self) -> str:
        return self.boot if self.alive else "boot-of-another-life"

    async def generate(self, *, rid: str, prompt_ids: Any, sampling: Sampling, extra_key: str, **_: Any) -> Generation:
        asked = Asked(rid, list(prompt_ids), extra_key)
        self.asked.append(asked)
        self.sent.append(rid)
        try:
            return await asked.answer
        finally:
            self.asked.remove(asked)

    async def abort(self, rid: str) -> None:
        assert rid
        self.aborted.append(rid)
        for asked in self.asked:
            if asked.rid.startswith(rid) and not asked.answer.done():
                asked.fail(Aborted("aborted", asked.tokens(*self.partial, finish="abort")))
