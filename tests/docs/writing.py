"""The rules of docs/internals/writing.md that a program can check."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_WORDS = 30
"""Of a sentence in a first line or a first paragraph."""
_OPENING = re.compile(r"^(What|That|Where|Which|Whether|Whatever|How far|As (?:it|they) (?:is|are))\b")
_FORMS = {
    "a clause of a clause": r"\bwhat\b[^.;:|]*\b(?:of|than|by|with|from) what\b",
    "a ratio of a time": r"×\d[\d.]* of (?:the|its|plain|what)\b",
    "a tensor or a device that lives": r"\b(?:live|lives|lived) (?:on|in|until|there)\b",
    "'held against'": r"\b(?:hold|holds|held) (?:\w+ )?against\b",
    "'told'": r"\b(?:told|tells)\b",
    "'comes on top'": r"\b(?:come|comes|came) on top\b",
    "'goes back'": r"\b(?:go|goes|went) back\b",
    "'less one'": r"\bless one\b",
    "two verbs that meet": r"\b(?:is is|are are|there is is|has is|does is)\b",
    "'what there is'": r"\bwhat(?:ever)? there is\b",
}

_CLAUSE = re.compile(r"\b(?:what|whatever|which|whose|whom)\b", flags=re.IGNORECASE)


def forms_in(text: str) -> Iterator[str]:
    """Yield the forms that no sentence may have, each with its place."""
    text = " ".join(text.split())
    for name, pattern in _FORMS.items():
        for match in re.finditer(pattern, text, flags=re.IGNORECASE):
            yield f"{name}: …{text[max(0, match.start() - 30) : match.end() + 30]}…"


def clauses_in(text: str) -> Iterator[str]:
    """Yield the clause that a text begins with, if it does."""
    if _OPENING.match(text):
        yield f"begins with a clause: {text[:60]}…"


def faults_of_opening(text: str) -> Iterator[str]:
    """Yield what is wrong with a first line or a first paragraph."""
    text = " ".join(text.split())
    yield from clauses_in(text)
    for sentence in re.split(r"(?<=[.:;?!])\s", re.sub(r"\([^)]*\)", "", text)):
        if len(sentence.split()) > MOST_WORDS:
            yield f"a sentence of {len(sentence.split())} words: {sentence[:60]}…"
    yield from forms_in(text)


def faults_of_line(text: str) -> Iterator[str]:
    """Yield what is wrong with the first line of a docstring or a help text; it stands alone in a list."""
    yield from faults_of_opening(text)
    if match := _CLAUSE.search(text):
        yield f"a clause with {match[0]!r}: {text[:60]}…"
