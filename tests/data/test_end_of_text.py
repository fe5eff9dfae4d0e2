"""The token that ends a document is known wherever documents are to be kept apart."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from settings import changed
from torch import nn

from slipstream.config.schema import Config, DataConfig, ModelSection
from slipstream.data import Corpus, load_corpus
from slipstream.data.prepare import prepare
from slipstream.data.tokens import DataError, Tokens
from slipstream.errors import ConfigError
from slipstream.model.spec import Loss, ModelSpec
from slipstream.train.build import build_components


def texts(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(200)))
    return path


def end_of(source: Path | str, **fields: object) -> int | None:
    return load_corpus(DataConfig((str(source),), separate_documents=True, **fields)).end_of_text  # type: ignore[arg-type]


def test_text_and_shards_tell_it(tmp_path: Path) -> None:
    assert end_of(texts(tmp_path)) == 0
    prepare([str(texts(tmp_path))], "bytes", tmp_path / "shards" / "a")
    assert end_of(tmp_path / "shards") == 0


def test_a_tokenizer_beside_the_shards_tells_it(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.add_special_tokens(["<pad>", "<|endoftext|>"])
    library.add_tokens(list("number 0123456789"))
    library.save(str(tmp_path / "tokenizer.json"))
    shards = prepare([str(texts(tmp_path))], str(tmp_path / "tokenizer.json"), tmp_path / "shards" / "a")
    assert end_of(tmp_path / "shards") == 1
    for shard in shards:  # as they were written before sidecars had this field
        sidecar = shard.with_suffix(".json")
        sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "end_of_text": None}))
    assert end_of(tmp_path / "shards") == 1
    assert end_of(tmp_path / "shards", end_of_text="<pad>") == 0


def test_shards_of_unknown_origin_need_its_id(tmp_path: Path) -> None:
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert end_of(tmp_path, token_dtype="uint16", end_of_text="299") == 299
    with pytest.raises(DataError, match=r"nothing tells which token ends a document.*set data.end_of_text to its id"):
        end_of(tmp_path, token_dtype="uint16")
    with pytest.raises(DataError, match=r"data.end_of_text is '300', but all token ids are below 300"):
        end_of(tmp_path, token_dtype="uint16", end_of_text="300")


def test_documents_without_an_end_cannot_be_kept_apart(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing tells which token ends a document"):
        end_of(texts(tmp_path), end_of_text="none")


def test_shards_that_end_documents_differently_are_refused(tmp_path: Path) -> None:
    first = prepare([str(texts(tmp_path))], "bytes", tmp_path / "shards" / "a", validation_fraction=0)
    prepare([str(texts(tmp_path))], "bytes", tmp_path / "shards" / "b", validation_fraction=0)
    sidecar = first[0].with_suffix(".json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "end_of_text": 10}))
    with pytest.raises(DataError, match=r"ends documents with the tokens \[0, 10\]: prepare them alike"):
        end_of(tmp_path / "shards")


def untold(config: DataConfig) -> Corpus:
    tokens = Tokens((np.zeros(5000, dtype=np.uint8),))
    return Corpus(tokens, tokens, 256, "bytes")


@dataclass(frozen=True)
class Bigrams(ModelSpec):
    vocab_size: int = 256
    sequence_length: int = 16
    dim: int = 8
    num_layers: int = 1

    def layers_and_loss(self, loss_chunk_tokens: int = 0) -> tuple[nn.Sequential, Loss]:
        raise AssertionError

    def initialise(self, layers: nn.Module, seed: int | None) -> None: ...

    def layer_flops(self) -> list[float]:
        return [1.0] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__loader": f"{__name__}.untold"}, "data.loader names none: give its Corpus an end_of_text"),
        ({"model__name": f"{__name__}.Bigrams"}, "not possible with a Bigrams: leave it out"),
    ],
    ids=["a loader of one's own", "a model of one's own"],
)
def test_what_does_not_support_it_says_so(tiny: Config, changes: dict[str, str], message: str) -> None:
    config = changed(replace(tiny, model=ModelSection()), data__separate_documents=True, **changes)
    with pytest.raises(ConfigError, match=message):
        build_components(config)
