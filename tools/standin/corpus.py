"""`python -m tools.standin.corpus`: training tokens and the stand-ins' tokenizer from public text."""

from __future__ import annotations

import hashlib
import json
import lzma
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import write_json
from specter.quantize.calibration import TOKENIZER
from tools.standin.sources import MIN_DOCUMENT_CHARS, SOURCES, fetch_package, read_python_library, read_source

SEPARATOR = "<s>"
VALID_ONE_IN = 50
ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "data" / "corpus"
TOKENS = CORPUS / "tokens.safetensors.xz"


@dataclass(frozen=True)
class Options:
    """Builds the corpus and the tokenizer. Needs Debian 12's apt; about ten minutes on two cores.

    Writes data/corpus/tokens.safetensors.xz (uint16 `train` and `valid`, documents separated by `<s>`, id 0),
    data/corpus/corpus.json (every package with version and SHA-256, sizes, the hash of the text) and
    data/standins/tokenizer.json (byte-level BPE).
    """

    vocab: int = 8192


class Deduplicator:
    """Drops documents, and long paragraphs within documents, that occurred before."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __call__(self, document: str) -> str | None:
        """The document without repeated paragraphs; None if too little is new."""
        kept = [part for part in document.split("\n\n") if len(part) < 80 or self._is_new(part)]
        text = "\n\n".join(kept).strip()
        return text if len(text) >= MIN_DOCUMENT_CHARS and self._is_new(f"document {text}") else None

    def _is_new(self, text: str) -> bool:
        key = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=12).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def is_validation(document: str) -> bool:
    """A fixed 2 % of the documents, chosen by their hash."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") % VALID_ONE_IN == 0


def train_tokenizer(documents: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with single digits; every byte string round-trips. `<s>` (id 0) starts every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    begin = tokenizer.token_to_id(SEPARATOR)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", pair=f"{SEPARATOR} $A {SEPARATOR} $B", special_tokens=[(SEPARATOR, begin)]
    )
    return tokenizer


def tokenize(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """uint16 [N]: each document after one separator."""
    pieces = []
    for start in range(0, len(documents), 256):  # encodings are large
        batch = tokenizer.encode_batch_fast(documents[start : start + 256], add_special_tokens=False)
        pieces += [np.array([0, *item.ids], dtype=np.uint16) for item in batch]
    return np.concatenate(pieces)


def load_tokens(path: Path) -> dict[str, np.ndarray]:
    """`train` and `valid`, uint16 [N] each, from tokens.safetensors.xz.

    Raises SpecterError: the file is missing or damaged.
    """
    if not path.is_file():
        raise SpecterError(f"no training tokens at {path}", "run `python -m tools.standin.corpus` first")
    try:
        tokens = load(lzma.decompress(path.read_bytes()))
        return {"train": tokens["train"], "valid": tokens["valid"]}
    except Exception as error:  # lzma, safetensors and a missing key raise different types
        raise SpecterError(f"{path} cannot be read: {error}", "build it again with tools.standin.corpus") from None


def _documents(packages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(source name, document) of every package and of the Python library; appends their origins to `packages`."""
    for source in SOURCES:
        deb = fetch_package(source.package, CORPUS / "packages")
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
            for document in read_source(source, Path(folder)):
                yield source.package, document
        version = subprocess.run(["dpkg-deb", "-f", deb, "Version"], check=True, capture_output=True, text=True)
        origin = {"version": version.stdout.strip(), "sha256": hashlib.sha256(deb.read_bytes()).hexdigest()}
        packages.append({"package": source.package, **origin, "files": source.pattern})
    for document in read_python_library():
        yield "cpython-stdlib", document
    packages.append({"package": "cpython-stdlib", "version": platform.python_version(), "files": "**/*.py"})


def build_corpus(vocab: int = Options.vocab) -> dict[str, Any]:
    """Writes the files that `Options` names; returns the content of corpus.json."""
    packages: list[dict[str, Any]] = []
    unique = Deduplicator()
    num_chars: dict[str, int] = {}
    documents: list[str] = []
    for name, raw in _documents(packages):
        if (document := unique(raw)) is not None:
            documents.append(document)
            num_chars[name] = num_chars.get(name, 0) + len(document)
    # Sorting by hash is a shuffle that does not depend on the order of the sources.
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    text_hash = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    train = [text for text in documents if not is_validation(text)]
    valid = [text for text in documents if is_validation(text)]
    tokenizer = train_tokenizer((text[:30000] for text in train[::3]), vocab)
    TOKENIZER.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(TOKENIZER))
    tokens = {"train": tokenize(tokenizer, train), "valid": tokenize(tokenizer, valid)}
    TOKENS.write_bytes(lzma.compress(save(tokens), preset=3))
    summary = {
        "packages": packages,
        "num_chars": num_chars,
        "num_documents": {"train": len(train), "valid": len(valid)},
        "num_tokens": {name: len(values) for name, values in tokens.items()},
        "text_sha256": text_hash,
        "tokenizer_sha256": hashlib.sha256(TOKENIZER.read_bytes()).hexdigest(),
        "vocab": vocab,
    }
    write_json(CORPUS / "corpus.json", summary)
    return summary


def run(options: Options) -> None:
    result = build_corpus(options.vocab)
    print(json.dumps({key: result[key] for key in ("num_documents", "num_tokens", "text_sha256")}))


if __name__ == "__main__":
    run_command(run, Options)
