"""Loads the corpus of a run with a loader that is chosen by name, or by the import path of your own function.

    def load(config: DataConfig) -> Corpus: ...

    slipstream train --data.loader mypackage.data.load --data.sources anything the function understands

The function returns token ids to train on and token ids held out. `Tokens` takes arrays, which may be memory-mapped.
Every process calls the function, and all must get the same tokens. Batches, resuming, replicas and studies work with
what it returns.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config.imports import find
from ..config.schema import DataConfig
from .corpus import Corpus, load_corpus
from .tokens import DataError

LOADERS: dict[str, Callable[[DataConfig], Corpus]] = {"files": load_corpus}
"""Loaders by the name that `data.loader` uses."""


def corpus_of(config: DataConfig) -> Corpus:
    load = find("data.loader", config.loader, LOADERS)
    if config.loader in LOADERS:
        return load(config)
    try:
        corpus = load(config)
    except DataError:
        raise
    except Exception as error:  # the user's function may raise any exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"data.loader = {config.loader!r} failed ({reason}): change the function") from error
    if not isinstance(corpus, Corpus):
        raise DataError(f"data.loader = {config.loader!r} returned a {type(corpus).__name__}: return a Corpus")
    if config.weights and not corpus.sources:
        raise DataError(
            f"data.weights = {list(config.weights)} has no effect with data.loader = {config.loader!r}, whose Corpus "
            "has no sources: return them, or leave the weights out"
        )
    return corpus
