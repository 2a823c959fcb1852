"""Texts: words and their numbers, and Sentiment140, tweets with the feeling that they express."""

import csv
import html
import io
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset

# What stands first in every vocabulary: words 0 and 1. No text has a token with a bracket and more.
SPECIAL = ("<padding>", "<unknown>")
VOCABULARY, TEXT_LENGTH = 10_000, 30

# Letters and digits with apostrophes inside, or one sign of another kind.
_TOKEN = re.compile(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]|_")
_COLUMNS = ("label", "id", "date", "query", "user", "text")
_CLASSES = {"0": "negative", "4": "positive"}
_TEST_PART = 10  # one in so many tweets, as in LEAF's example


def tokenize(text: str) -> list[str]:
    """The words of a text in lower case, and each of its signs by itself."""
    # Interned, so that of millions of texts each word is kept once.
    return [sys.intern(token) for token in _TOKEN.findall(text.lower())]


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """The words that are told apart: `SPECIAL`, then the most frequent tokens, `size` in all.

    Among equally frequent ones, those first in the alphabet; fewer where there are no more. Raises
    ValueError for a size below 3.
    """
    checks.integer("vocabulary", size, len(SPECIAL) + 1)
    counts = Counter(token for tokens in texts for token in tokens)
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    return SPECIAL + tuple(by_frequency[: size - len(SPECIAL)])


def encode(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> np.ndarray:
    """Texts of N as numbers of words: [N, length] int32, 0 after a text's end, 1 for unknown words.

    What is longer is cut off. Raises ValueError for a length below 1.
    """
    checks.integer("text_length", length)
    checks.memory("text_length", length, 4 * length * len(texts))
    number = {word: index for index, word in enumerate(words)}
    x = np.zeros((len(texts), length), np.int32)
    for row, tokens in zip(x, texts, strict=True):
        numbers = [number.get(token, 1) for token in tokens[:length]]
        row[: len(numbers)] = numbers
    return x


def sentiment140(path: Path, vocabulary_size: int, length: int) -> Dataset:
    """Reads Sentiment140 (Go et al. 2009): csv of label (0 or 4), id, date, query, user and text.

    Without a header; in UTF-8, or else Latin-1 as it is distributed. The test split is the tenth of
    the tweets whose ids have the lowest checksums: it is the same for all seeds, so that the
    vocabulary, made of the other tweets alone, has seen no tested text of any. Tweets of an id stay
    together. vocabulary_size, length: as in `vocabulary` and `encode`. Raises ValueError for
    another content.
    """
    name = str(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{name=}: cannot be read: {error.strerror}") from None
    try:
        whole = content.decode()
    except UnicodeDecodeError:
        whole = content.decode("latin-1")
    rows = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(whole, newline="")), 1):
            if len(row) != len(_COLUMNS) or row[0] not in _CLASSES:
                raise UsageError(
                    f"{name=}: must hold the columns {', '.join(_COLUMNS)} without a header, and "
                    f"labels 0 or 4; row {number} has {len(row)} columns and starts with "
                    f"{row[0][:20] if row else ''!r}"
                )
            rows.append(row)
    except csv.Error as error:
        raise UsageError(f"{name=}: must be a csv file: {error}") from None
    if not rows:
        raise UsageError(f"{name=}: must hold at least one example")
    labels, ids, _, _, users, texts = zip(*rows, strict=True)
    checksum = np.array([zlib.crc32(each.encode()) for each in ids])
    test = checksum <= np.sort(checksum)[(len(rows) - 1) // _TEST_PART]
    if test.all():
        raise UsageError(f"{name=}: must hold tweets of several ids, some of them for the test")
    tokens = [tokenize(html.unescape(text)) for text in texts]
    train = (tokens[row] for row in np.flatnonzero(~test))
    words = vocabulary(train, vocabulary_size)
    return Dataset(
        encode(tokens, words, length),
        np.array([list(_CLASSES).index(label) for label in labels], np.int32),
        tuple(_CLASSES.values()),
        np.zeros(len(rows), np.int32),
        ("all",),
        test,
        user=np.unique(users, return_inverse=True)[1].astype(np.int32),
        words=words,
    )
