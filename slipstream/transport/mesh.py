"""Maps ranks to stages and replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """A layout of stages x replicas: it says which rank is which stage of which replica."""

    num_stages: int
    num_replicas: int = 1
    placement: str = "pipeline"
    """Choice of the processes that have consecutive ranks. "pipeline": the stages of a replica, so that neighbours are
    close. "replica": the replicas of a stage."""

    @property
    def size(self) -> int:
        return self.num_stages * self.num_replicas

    def rank(self, replica: int, stage: int) -> int:
        if self.placement == "pipeline":
            return replica * self.num_stages + stage
        return stage * self.num_replicas + replica

    def name(self, rank: int) -> str:
        replica, stage = self.place(rank)
        return f"stage {stage}" if self.num_replicas == 1 else f"stage {stage} of replica {replica}"

    def place(self, rank: int) -> tuple[int, int]:
        """Returns the replica and the stage of a rank."""
        if self.placement == "pipeline":
            return divmod(rank, self.num_stages)
        stage, replica = divmod(rank, self.num_replicas)
        return replica, stage
