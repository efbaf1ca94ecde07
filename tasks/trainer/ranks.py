"""The ranks of the trainer as one: each does its part, and what fails on one is raised on all."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from conf.errors import CheckpointError, RatchetError, TrainerError

T = TypeVar("T")


class Ranks:
    """`control` is a gloo group. Every rank calls every method, in the same order."""

    def __init__(self, control: Any) -> None:
        self.control = control
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.leader = self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank. Small and picklable."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, work: Callable[[], T]) -> T:
        """Do something that may fail on one rank only; if it did, raise on all. CheckpointError stays what it is."""
        result: T | None = None
        failure: tuple[type[TrainerError], str] | None = None
        try:
            result = work()
        except CheckpointError as error:
            failure = (CheckpointError, str(error))
        except (RatchetError, OSError) as error:
            failure = (TrainerError, f"rank {self.rank}: {type(error).__name__}: {error}")
        for found in self.gather(failure):
            if found:
                kind, message = found
                raise kind(message)
        return result  # type: ignore[return-value]  # None only where `work` gives None

    def lead(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 alone; its result, or its failure, on all."""
        return self.gather(self.together(lambda: work() if self.leader else None))[0]  # type: ignore[return-value]
