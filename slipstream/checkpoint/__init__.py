"""Checkpoints on disk: parts that several processes write, committed at once, verified, and kept by rule.

Knows files and tensors, not pipelines: what is in a checkpoint and when it is taken is decided elsewhere.
"""

from .store import Checkpoint, CheckpointError, Part, Store
from .writer import Writer, Written

__all__ = ["Checkpoint", "CheckpointError", "Part", "Store", "Writer", "Written"]
