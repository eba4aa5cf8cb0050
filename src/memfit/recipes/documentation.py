"""Python's own documentation as text: the standard library carries it, so that it needs no download.

It is what `help("assert")` shows: the language reference by topic, about half a megabyte of English.
"""

from __future__ import annotations

import re
import textwrap
import zlib
from functools import lru_cache

import torch
from torch import Tensor

from memfit.errors import WorkloadError
from memfit.recipes.language import Split

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_LEAST_WORDS = 5  # of a sentence: shorter ones are headings and leftovers of lists


@lru_cache(maxsize=2)
def python_documentation(split: Split) -> tuple[str, ...]:
    """Return the paragraphs of one part in their order, code and grammar among them.

    A paragraph belongs to the validation part when its CRC-32 is a multiple of 5; the few that several topics have are
    there once.

    Raises:
        WorkloadError: This Python has no documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise WorkloadError(
            "this Python has no pydoc_data.topics, the text that the recipe trains on: use a full installation"
        ) from error
    paragraphs = (part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name].strip()))
    is_wanted = split == "validation"
    return tuple(p for p in dict.fromkeys(paragraphs) if (zlib.crc32(p.encode()) % 5 == 0) == is_wanted)


def documentation_bytes(split: Split) -> Tensor:
    """Return one part as uint8 [n_bytes]."""
    return torch.frombuffer(bytearray("\n\n".join(python_documentation(split)).encode()), dtype=torch.uint8)


def neighbours(split: Split) -> list[tuple[str, str]]:
    """Return the pairs of sentences that follow one another in a paragraph, in the order of the text.

    No sentence is in two pairs: it would be the nearest one to itself.
    """
    pairs: list[tuple[str, str]] = []
    for paragraph in filter(_is_prose, python_documentation(split)):
        sentences = [s for s in _SENTENCE_END.split(" ".join(paragraph.split())) if len(s.split()) >= _LEAST_WORDS]
        pairs += zip(sentences[::2], sentences[1::2], strict=False)
    return pairs


def _is_prose(paragraph: str) -> bool:
    """Tell a paragraph from code, grammar, tables and headings."""
    words = textwrap.dedent(paragraph).strip()
    marks = ("::=", ">>>", "****", "====", "----", "|", "...")
    return words.endswith((".", "!", "?")) and not any(mark in words for mark in marks)
