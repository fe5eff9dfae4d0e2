"""Checkpoints on disk. Several processes write the parts of a checkpoint, which is committed atomically and verified.

This package knows files and tensors, not pipelines. What is in a checkpoint and when it is made is decided elsewhere.
"""

from .reading import load_weights
from .store import Checkpoint, CheckpointError, Part, Store
from .writer import Writer, Written

__all__ = ["Checkpoint", "CheckpointError", "Part", "Store", "Writer", "Written", "load_weights"]
