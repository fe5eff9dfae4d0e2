"""Text in, the same batches out for whoever asks: a corpus is token ids, a batch a function of its index."""

from .batches import Batches, ValidationBatches, validation_batches
from .corpus import Corpus, DataConfig, load_corpus
from .loaders import corpus_of
from .prepare import prepare
from .tokens import DataError, Tokens

__all__ = [
    "Batches",
    "Corpus",
    "DataConfig",
    "DataError",
    "Tokens",
    "ValidationBatches",
    "corpus_of",
    "load_corpus",
    "prepare",
    "validation_batches",
]
