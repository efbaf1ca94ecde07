"""A GPU that fake engines and a fake trainer share: what is free there is what neither holds."""

from collections.abc import Sequence

from conf.errors import TrainerError
from tests.fakes.engine import FakeEngine

GPU = "cuda:0"
ENGINES, TRAINER, TOTAL = 60, 50, 100  # bytes of all engines, of the trainer, of the device: no room for both


class FakeGpuTrainer:
    """The trainer's commands for a hand-over. `held` is what it has on the device; a reload without room dies.

    Of `slow` questions how much is free, the last is answered as things are now: the driver takes its time to show what
    was freed. `keeps` bytes stay taken on the device for ever, as another process' would. `fail` names the command that
    raises next. `wrong` collects what must never happen.
    """

    def __init__(self, fakes: Sequence[FakeEngine], slow: int = 3) -> None:
        self.fakes = fakes
        self.slow = slow
        self.held = 0
        self.keeps = 0
        self.fail = ""
        self.wrong: list[str] = []
        self.calls: list[str] = []
        self._seen, self._asked = self.taken, 0

    @property
    def taken(self) -> int:
        there = sum(fake.alive and not fake.released for fake in self.fakes)
        return self.keeps + self.held + ENGINES // len(self.fakes) * there

    async def offload(self) -> dict[str, int]:
        self._command("offload")
        self.held = 0
        return {GPU: TRAINER}

    async def reload(self) -> None:
        self._command("reload")
        self.held = TRAINER
        if self.taken > TOTAL:
            self.wrong.append(f"reload with {self.taken} bytes of {TOTAL} taken")
        if busy := [fake for fake in self.fakes if fake.running]:
            self.wrong.append(f"reload while {len(busy)} engines work")

    async def memory(self) -> dict[str, int]:
        self._asked += 1
        if self._asked % self.slow == 0 or self.taken > self._seen:
            self._seen = self.taken
        return {GPU: TOTAL - self._seen}

    def _command(self, name: str) -> None:
        self.calls.append(name)
        if self.fail == name:
            self.fail = ""
            raise TrainerError(f"{name}: rank 0 of 1 ended with signal SIGKILL")
