"""A tokenizer and a text dataset made on the spot from the Python standard library's own sources.

Nothing is downloaded. Both are kept in a cache folder; processes that start together may all make them, the
first to finish wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

VOCABULARY = 2048  # what torchtitan's debug model has room for
TEXT_CHARACTERS = 8_000_000
SAMPLE_CHARACTERS = 4_000
BOS, EOS = "<|begin|>", "<|end|>"


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/pgraph-torchtitan``, or the same below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pgraph-torchtitan"


def tokenizer_folder(cache: Path) -> Path:
    """A folder that torchtitan takes for ``model.hf_assets_path``; made if it is not there."""
    return _once(cache / "tokenizer", _make_tokenizer)


def dataset_folder(cache: Path) -> Path:
    """A folder with one JSON-lines file, a ``text`` in each line; made if it is not there."""
    return _once(cache / "text", _make_dataset)


def sources(limit: int) -> Iterator[str]:
    """The standard library's sources in pieces, at most `limit` characters in all.

    Raises:
        FileNotFoundError: this Python was installed without its library's text.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    left = limit
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        with contextlib.suppress(UnicodeDecodeError):  # a few files test other encodings
            text = path.read_text(encoding="utf-8")[:left]
            for start in range(0, len(text), SAMPLE_CHARACTERS):
                yield text[start : start + SAMPLE_CHARACTERS]
            left -= len(text)
        if left <= 0:
            return
    if left == limit:
        raise FileNotFoundError(f"no *.py sources in {folder}: install Python with its library's text")


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources(TEXT_CHARACTERS // 4), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _make_dataset(folder: Path) -> None:
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": piece}) + "\n" for piece in sources(TEXT_CHARACTERS))


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, filled by `make` if it is not there; never seen half-filled."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            make(beside)
            with contextlib.suppress(OSError):  # another process was first
                beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder
