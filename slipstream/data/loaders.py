"""Loads the corpus of a run with a loader that is chosen by name, or by the import path of your own function.

    def load(config: DataConfig) -> Corpus: ...

    slipstream train --data.loader mypackage.data.load --data.sources anything the function understands

The function returns token ids to train on and token ids held out. `Tokens` takes arrays, which may be memory-mapped.
Every process calls the function, and all must get the same tokens. Batches, resuming, replicas and studies work with
what it returns.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..config.imports import find
from ..config.schema import DataConfig
from ..errors import in_one_line
from .corpus import Corpus, load_corpus
from .tokens import DataError

LOADERS: dict[str, Callable[[DataConfig], Corpus]] = {"files": load_corpus}
"""Loaders by the name that `data.loader` uses."""
SAMPLE_IDS = 2**16
"""Number of ids of every array that are looked at."""


def corpus_of(config: DataConfig) -> Corpus:
    load = find("data.loader", config.loader, LOADERS)
    if config.loader in LOADERS:
        return load(config)
    try:
        corpus = load(config)
    except DataError:
        raise
    except Exception as error:  # the user's function may raise any exception
        reason = in_one_line(error)
        raise DataError(f"data.loader = {config.loader!r} failed ({reason}): change the function") from error
    if not isinstance(corpus, Corpus):
        raise DataError(f"data.loader = {config.loader!r} returned a {type(corpus).__name__}: return a Corpus")
    if (wrong := _what_is_wrong(corpus)) is not None:
        raise DataError(f"data.loader = {config.loader!r} returned {wrong}: change the function")
    if config.weights and not corpus.sources:
        raise DataError(
            f"data.weights = {list(config.weights)} has no effect with data.loader = {config.loader!r}, whose Corpus "
            "has no sources: return them, or leave the weights out"
        )
    return corpus


def _what_is_wrong(corpus: Corpus) -> str | None:
    """Looks at the vocabulary, and at the arrays and their first ids."""
    if not isinstance(corpus.vocab_size, int) or corpus.vocab_size < 1:
        return f"a Corpus with vocab_size = {corpus.vocab_size!r}, which is no whole number above 0"
    for part in (*corpus.train.parts, *corpus.validation.parts):
        if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer):
            return f"ids as a {part.ndim}-D array of {part.dtype}, and not as a 1-D array of integers"
        first = part[:SAMPLE_IDS]
        if len(first) and not (first.min() >= 0 and first.max() < corpus.vocab_size):
            return f"ids from {first.min()} to {first.max()}, and vocab_size = {corpus.vocab_size}"
    return None
