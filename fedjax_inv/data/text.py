"""Texts as word numbers, and Sentiment140: tweets with the sentiment that they express."""

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

from fedjax_inv.data.dataset import Dataset

# Words 0 and 1 of every vocabulary. No text's token combines a bracket with letters.
SPECIAL = ("<padding>", "<unknown>")
VOCABULARY, TEXT_LENGTH = 10_000, 30

# Letters and digits with apostrophes inside, or one other sign.
_TOKEN = re.compile(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]|_")
COLUMNS = ("label", "id", "date", "query", "user", "text")
_CLASSES = {"0": "negative", "4": "positive"}
_TEST_PART = 10  # one in ten tweets is for the test, as in LEAF's example


def tokenize(text: str) -> list[str]:
    """Split a text into its words in lower case and its punctuation marks."""
    # Interned: each word of millions of texts is stored once.
    return [sys.intern(token) for token in _TOKEN.findall(text.lower())]


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """Return a vocabulary: `SPECIAL`, then the most frequent tokens of texts.

    It has `size` words, at least 3, or fewer if the texts have fewer. Equally frequent tokens are
    taken in alphabetical order.
    """
    counts: Counter[str] = Counter()
    for tokens in texts:
        counts.update(tokens)
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    return SPECIAL + tuple(by_frequency[: size - len(SPECIAL)])


def encode(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> np.ndarray:
    """Turn N texts as tokens into word numbers [N, length] int32, cut or padded to that length.

    0 stands after a text's end, and 1 for an unknown word.
    """
    number = {word: index for index, word in enumerate(words)}
    x = np.zeros((len(texts), length), np.int32)
    for row, tokens in zip(x, texts, strict=True):
        numbers = [number.get(token, 1) for token in tokens[:length]]
        row[: len(numbers)] = numbers
    return x


def sentiment140(path: Path, vocabulary_size: int, length: int) -> Dataset:
    """Read Sentiment140 (Go et al. 2009): csv of label (0 or 4), id, date, query, user and text.

    The file has no header; it is in UTF-8, or in Latin-1 as it is distributed. The test split is
    the tenth of the tweets whose ids have the lowest checksums. So it is the same for all seeds,
    and the vocabulary, which comes from the other tweets alone, never includes a test text. Tweets
    with one id stay together. The data set has users and words.
    """
    content = path.read_bytes()
    try:
        whole = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        whole = content.decode("latin-1")
    rows = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(whole, newline="")), 1):
            if row and (len(row) != len(COLUMNS) or row[0] not in _CLASSES):
                text = f"must hold the columns {', '.join(COLUMNS)} of Sentiment140 without a "
                text += f"header, and labels 0 or 4; row {number} has {len(row)} columns and "
                raise ValueError(f"{text}starts with {row[0][:20]!r}")
            rows += [row] if row else []
    except csv.Error as error:
        raise ValueError(f"must be a csv file: {error}") from None
    if not rows:
        raise ValueError("must hold at least one example")
    labels, ids, _, _, users, texts = zip(*rows, strict=True)
    checksum = np.array([zlib.crc32(each.encode()) for each in ids])
    test = checksum <= np.sort(checksum)[(len(rows) - 1) // _TEST_PART]
    if test.all():
        raise ValueError("must hold tweets of several ids, some of them for the test")
    tokens = [tokenize(html.unescape(text)) for text in texts]
    words = vocabulary((tokens[row] for row in np.flatnonzero(~test)), vocabulary_size)
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
