"""Turns text into batches. A corpus is a sequence of token ids. A batch is a function of its index, so all processes
get the same batches."""

from .batches import Batches, ValidationBatches, validation_batches
from .codec import Codec, codec_of_corpus
from .corpus import Corpus, DataConfig, check_sources, known_vocab_size, load_corpus
from .loaders import corpus_of
from .mixture import Source
from .prepare import prepare
from .text_size import TextSize, text_size
from .tokens import DataError, Tokens

__all__ = [
    "Batches",
    "Codec",
    "Corpus",
    "DataConfig",
    "DataError",
    "Source",
    "TextSize",
    "Tokens",
    "ValidationBatches",
    "check_sources",
    "codec_of_corpus",
    "corpus_of",
    "known_vocab_size",
    "load_corpus",
    "prepare",
    "text_size",
    "validation_batches",
]
