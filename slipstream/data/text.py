"""Turns files into token ids: finds the files, splits them into documents, and applies a tokenizer.

Files are read in pieces and never as a whole, so that `prepare` can read any number of gigabytes. A document is one
line of a .jsonl file, which may be compressed, or the text between two lines `<|endoftext|>` of a .txt file. Each
document ends with the tokenizer's end-of-text token, or with a zero byte if tokens are bytes.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ..config.files import expand_home, read_plain_file
from .tokens import DataError, optional

ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>")
"""Names of the token that ends a document, in the order in which they are looked up in a tokenizer."""
NO_END_OF_TEXT = "none"
TEXT_SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET_SUFFIX = ".parquet"
SHARD_SUFFIX = ".bin"
HUB_PREFIX = "hf:"
"""Comes before the name of a dataset, or of a model that has a tokenizer, of the Hugging Face Hub."""

_SEPARATOR = re.compile(r"^<\|endoftext\|>\r?(?:\n|\Z)", re.MULTILINE)
_PIECE_BYTES = 2**17
_GROUP_CHARACTERS = 2**21


@dataclass(frozen=True)
class Tokenizer:
    name: str
    """Name of the tokenizer: "bytes", or a file's name and the start of its SHA-256."""
    vocab_size: int
    """Number of token ids. Every id is smaller."""
    end_of_text: int | None
    """Id of the token that ends a document. None means that nothing marks the end."""
    encode: Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]]
    """Function that returns the ids of each of several texts."""
    source: bytes | None = None
    """Content of the tokenizer.json. None for the tokenizer "bytes"."""

    @property
    def dtype(self) -> str:
        """Returns the narrowest dtype that holds every id."""
        return "uint8" if self.vocab_size <= 2**8 else "uint16" if self.vocab_size <= 2**16 else "uint32"


class Piece(NamedTuple):
    text: str
    ends_document: bool
    position: int
    """Number of bytes of the file, or of rows of the dataset, read so far."""


class Text(NamedTuple):
    """A file, or a split of a dataset, of which nothing has been read."""

    pieces: Iterator[Piece]
    size: int | None
    """Position of the last piece. None means that it is unknown."""


def load_tokenizer(tokenizer: str, section: str = "", end_of_text: str | None = None) -> Tokenizer:
    """Loads the tokenizer "bytes", or that of a tokenizer.json, of a folder that contains one, or of "hf:" and the name
    of a model of the Hugging Face Hub.

    section: prefix of the names of the two settings in error messages. end_of_text: the token that ends a document.
    None means the first of ENDS_OF_TEXT that the tokenizer has. NO_END_OF_TEXT means that nothing marks the end of a
    document.
    """
    field = f"{section}tokenizer"
    if tokenizer == "bytes":
        if end_of_text not in (None, NO_END_OF_TEXT):
            raise DataError(
                f"{section}end_of_text is {end_of_text!r}, and bytes have no such token: leave it out, a zero byte "
                "ends a document."
            )
        end = 0 if end_of_text is None else None
        return Tokenizer("bytes", 256, end, lambda texts: [np.frombuffer(t.encode(), np.uint8) for t in texts])
    tokenizers = optional("tokenizers", "text", f"{field} is {tokenizer!r}, which")
    path = _download(tokenizer, field) if tokenizer.startswith(HUB_PREFIX) else expand_home(tokenizer)
    if path.is_dir():
        path /= "tokenizer.json"
        if not path.is_file():
            raise DataError(f"{field} is {tokenizer!r}, a folder without a tokenizer.json: give one that has it.")
    if not path.is_file():
        raise DataError(f'{field} is {tokenizer!r}, which does not exist: give "bytes" or a tokenizer.json.')
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise DataError(
            f"{field} is {tokenizer!r}, which is no tokenizer ({error}): "
            "give a tokenizer.json as the tokenizers library saves it."
        ) from None
    # A tokenizer.json for a classifier may truncate or pad its input.
    library.no_truncation()
    library.no_padding()
    source = path.read_bytes()
    return Tokenizer(
        name=name_of(path.name, source),
        vocab_size=max(library.get_vocab(with_added_tokens=True).values(), default=0) + 1,
        end_of_text=_end_of_text(library.token_to_id, tokenizer, section, end_of_text or end_of_folder(path.parent)),
        encode=lambda texts: [each.ids for each in library.encode_batch(texts, add_special_tokens=False)],
        source=source,
    )


def _download(tokenizer: str, field: str) -> Path:
    """Returns the tokenizer.json of a model of the Hub, from the cache if it is there."""
    import huggingface_hub  # the tokenizers library needs it too

    try:
        return Path(huggingface_hub.hf_hub_download(tokenizer.removeprefix(HUB_PREFIX), "tokenizer.json"))
    except Exception as error:  # of the name, the Hub or the network
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{field} is {tokenizer!r}, whose tokenizer.json cannot be downloaded ({reason}): check the name and the "
            "network, or give a tokenizer.json."
        ) from None


def name_of(file: str, source: bytes) -> str:
    """Returns the name that identifies a tokenizer file: the name of the file and the start of its SHA-256."""
    return f"{file} {hashlib.sha256(source).hexdigest()[:16]}"


def _end_of_text(id_of: Callable[[str], int | None], tokenizer: str, section: str, name: str | None) -> int | None:
    if name == NO_END_OF_TEXT:
        return None
    names = ENDS_OF_TEXT if name is None else (name,)
    found = next((number for each in names if (number := id_of(each)) is not None), None)
    if found is None and name is None:
        raise DataError(
            f"{section}tokenizer is {tokenizer!r}, which has no token {', '.join(names[:4])} to end a document with: "
            f'name its own with {section}end_of_text, or set that to "{NO_END_OF_TEXT}".'
        )
    if found is None:
        raise DataError(f"{section}end_of_text is {name!r}, which is no token of {tokenizer!r}: name one that is.")
    return found


def end_of_folder(folder: Path) -> str | None:
    """Returns the token that ends a document, as the tokenizer_config.json of a folder names it."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        token = json.loads(read_plain_file(path))["eos_token"]
    except KeyError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{str(path)!r} cannot be read ({error}): repair it, or remove it.") from error
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """Returns the id of every token of a tokenizer.json, without the library that uses it."""
    tree = json.loads(tokenizer_json)
    vocabulary = tree["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # pairs of a token and its score, in the order of their ids
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in tree.get("added_tokens", ())}


def expand(sources: Sequence[str], field: str, suffixes: Sequence[str] = (*TEXT_SUFFIXES, SHARD_SUFFIX)) -> list[Path]:
    """Returns the files that a list of files, folders and globs refers to, in a stable order.

    field: name of the setting in error messages. suffixes: suffixes of the files that can be read.
    """
    known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
    files: list[Path] = []
    for source in sources:
        if source.startswith(HUB_PREFIX):
            raise DataError(
                f"{field} names {source!r}, which only slipstream prepare reads, and not together with files: run "
                "it on the dataset alone, and name the shards that it writes."
            )
        path = expand_home(source)
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.name.endswith(tuple(suffixes)) and file.is_file())
            if not found:
                _refuse_parquet(sorted(path.rglob(f"*{PARQUET_SUFFIX}")), field)
                raise DataError(f"{field} names the folder {source!r}, which holds no {known} file: add one.")
        elif path.is_file():
            found = [path]
        else:
            found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
            if not found:
                raise DataError(f"{field} names {source!r}, which does not exist: give a file, a folder or a glob.")
        for file in found:
            if not file.name.endswith(tuple(suffixes)):
                _refuse_parquet([file], field)
                raise DataError(f"{field} names {str(file)!r}, whose suffix is not known: give a {known} file.")
        files += found
    if not files:
        raise DataError(f"{field} is empty: give at least one file, folder or glob.")
    return list(dict.fromkeys(files))


def _refuse_parquet(files: list[Path], field: str) -> None:
    for file in files:
        if file.suffix == PARQUET_SUFFIX:
            raise DataError(
                f"{field} names {str(file)!r}, which only slipstream prepare reads: run slipstream prepare on it, and "
                "name the shards that it writes."
            )


def read_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    """Yields the text of one file, of which TEXT_SUFFIXES lists the kinds, document by document. A long document of a
    .txt file is yielded in several pieces."""
    return _read_text(path) if path.suffix == ".txt" else _read_jsonl(path, text_field)


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the ids of many pieces at a time, and the position of the last piece. Tokenizers encode many texts in
    parallel.

    If a document has several pieces, a tokenizer may split a few characters at their boundaries differently than in the
    whole document.
    """
    for group in _groups(pieces):
        ids = []
        for piece, encoded in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
            ids.append(np.asarray(encoded, dtype=tokenizer.dtype))
            if piece.ends_document and tokenizer.end_of_text is not None:
                ids.append(np.asarray([tokenizer.end_of_text], dtype=tokenizer.dtype))
        yield np.concatenate(ids), group[-1].position


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _read_text(path: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    inside = False  # a document has begun and not ended
    with path.open("rb") as file:
        while True:
            # Reads up to the end of a line, so that no separator is cut. A very long line is cut nevertheless.
            block = file.read(_PIECE_BYTES) + file.readline(_PIECE_BYTES)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                position = file.tell() - len(error.object) + error.start
                raise DataError(
                    f"{str(path)!r} is not UTF-8 at byte {position}: convert it, with iconv for example."
                ) from None
            *ended, rest = _SEPARATOR.split(text)
            for document in ended:
                if inside or document:
                    yield Piece(document, True, file.tell())
                inside = False
            if rest:
                yield Piece(rest, False, file.tell())
                inside = True
            if not block:
                break
        if inside:
            yield Piece("", True, file.tell())


def _read_jsonl(path: Path, text_field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if not line.strip():
                continue
            where = f"{str(path)!r} line {number}"
            try:
                document = json.loads(line)
            except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError
                raise DataError(f"{where} is not JSON ({error}): write one object on each line.") from None
            text = document.get(text_field) if isinstance(document, dict) else None
            if not isinstance(text, str):
                raise DataError(f"{where} has no text in the field {text_field!r}: write it there, or set text_field.")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise DataError(f"{where} holds half a surrogate pair: escape its text as UTF-8.") from None
            if text:
                yield Piece(text, True, file.tell())


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file, decompressed if its suffix says that it is compressed."""
    if path.suffix == ".jsonl":
        yield from file
        return
    try:
        yield from _decompressed(path, file)
    except (OSError, EOFError, zlib.error) as error:  # of pyarrow and gzip
        raise DataError(f"{str(path)!r} cannot be decompressed ({error}): compress it again.") from None


def _decompressed(path: Path, file: BinaryIO) -> Iterable[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    pyarrow = optional("pyarrow", "parquet", repr(str(path)))
    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
