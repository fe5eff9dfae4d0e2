"""Checkpoints on disk. Several processes write the parts of a checkpoint, which is committed atomically and verified.

This package knows files and tensors, not pipelines. What is in a checkpoint and when it is made is decided elsewhere.
"""

from .files import CheckpointError
from .reading import load_weights
from .store import Checkpoint, Part, Store

__all__ = ["Checkpoint", "CheckpointError", "Part", "Store", "load_weights"]
