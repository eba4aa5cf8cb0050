"""Random programs: records of small training steps, drawn from a generator, and written as text.

A program is valid whatever is taken out of it: operands are counted back from where they are used.
"""

from __future__ import annotations

from random import Random

import msgspec

from benchmarks.fuzzing.functions import FUNCTIONS
from benchmarks.fuzzing.layers import LAYERS
from benchmarks.fuzzing.operators import (
    HOOKS,
    IN_PLACE,
    IN_PLACE_OF_TWO,
    NOT_DIFFERENTIABLE,
    OF_TWO,
    SAVING,
    SEVERAL,
    VIEWS,
    arity,
)

WITHIN = ("", "", "", "checkpoint", "reentrant", "no_grad", "autocast", "float32", "hooks", "on_cpu")
"""What a call may be within: activation checkpointing, contexts of autograd, and of precision."""
HOOKED = (
    "",
    "",
    "",
    "keeps",
    "keeps detached",
    "collects",
    "replaces output",
    "replaces input",
    "backward",
    "before backward",
)
"""What the hooks of a block do."""
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "adam-fused", "adam-single")
BATCHES = ("tuple", "dict", "nested")
_KINDS = (
    (VIEWS, 4),
    (IN_PLACE, 3),
    (IN_PLACE_OF_TWO, 2),
    (SAVING, 6),
    (SEVERAL, 2),
    (NOT_DIFFERENTIABLE, 2),
    (OF_TWO, 4),
)
_RARE = ((HOOKS, 1), (FUNCTIONS, 2), (LAYERS, 7))


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation of a block.

    Attributes:
        name: An operator, a layer, or "call" for another block.
        back: For each operand, how many results back it is; beyond the first, the block's input.
        n: Chooses among variants.
    """

    name: str
    back: tuple[int, ...]
    n: int


class Block(msgspec.Struct, frozen=True, array_like=True):
    """One module.

    Attributes:
        operations: What its forward pass does.
        residual: Whether its input is added to what it makes.
        hook: What its hooks do, of `HOOKED`.
        returns: "tensor", or "tuple" or "dict" with another result.
        holds: Whether it holds all results until it returns.
    """

    operations: tuple[Operation, ...]
    residual: bool = False
    hook: str = ""
    returns: str = "tensor"
    holds: bool = False


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call of a block by the model.

    Attributes:
        block: Which one.
        within: What it is called within, of `WITHIN`.
        back: How many results back its input is.
    """

    block: int
    within: str = ""
    back: int = 1


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """What the loss function does.

    Attributes:
        kind: Of the loss (`layers.loss_of`).
        metric: A metric taken within: "", "accuracy", "kept" or "read".
        others: Whether further results of blocks are in it.
        counted: Whether a sum and a count are returned.
        penalty: Whether the norm of the parameters is added.
    """

    kind: int = 0
    metric: str = ""
    others: bool = False
    counted: bool = False
    penalty: bool = False


class Program(msgspec.Struct, frozen=True, array_like=True):
    """A training step.

    Attributes:
        seed: Of its weights, data and draws.
        shape: Samples, rows and features of its input.
        blocks: Its modules; each may call those before it.
        calls: What its model calls.
        tied: Whether linear layers of one shape share their weight.
        unused: Whether there is a parameter that nothing uses.
        loss: Of the model's output.
        optimizer: Of `OPTIMIZERS`.
        clips: Whether gradients are clipped.
        batch: Of `BATCHES`.
    """

    seed: int
    shape: tuple[int, int, int]
    blocks: tuple[Block, ...]
    calls: tuple[Call, ...]
    tied: bool = False
    unused: bool = False
    loss: Loss = Loss()
    optimizer: str = "sgd"
    clips: bool = False
    batch: str = "tuple"


def drawn(random: Random) -> Program:
    """Return a random program."""
    blocks = tuple(_block(random, index) for index in range(random.randint(1, 3)))
    calls = [Call(index, random.choice(WITHIN), random.choice((1, 1, 1, 2))) for index in range(len(blocks))]
    calls += [Call(random.randrange(len(blocks)), random.choice(WITHIN)) for _ in range(random.choice((0, 0, 1)))]
    return Program(
        seed=random.randrange(1000),
        shape=(random.choice((2, 4, 8)), random.choice((6, 8, 16)), random.choice((8, 16, 32, 48))),
        blocks=blocks,
        calls=tuple(calls),
        tied=random.random() < 0.3,
        unused=random.random() < 0.2,
        loss=_loss(random),
        optimizer=random.choice(OPTIMIZERS),
        clips=random.random() < 0.2,
        batch=random.choice(BATCHES),
    )


def _block(random: Random, index: int) -> Block:
    count = random.randint(1, 5)
    return Block(
        operations=tuple(_operation(random, index) for _ in range(count)),
        residual=random.random() < 0.4,
        hook=random.choice(HOOKED),
        returns=random.choice(("tensor", "tensor", "tuple", "dict")),
        holds=random.random() < 0.2,
    )


def _operation(random: Random, index: int) -> Operation:
    if index and random.random() < 0.06:
        return Operation("call", (_back(random),), random.randrange(index))
    kinds = [*_KINDS, *_RARE]
    (kind,) = random.choices([sorted(names) for names, _ in kinds], [weight for _, weight in kinds])
    name = random.choice(kind)
    return Operation(name, tuple(_back(random) for _ in range(arity(name))), random.randrange(24))


def _back(random: Random) -> int:
    return random.choice((1, 1, 1, 2, 3, 5))


def _loss(random: Random) -> Loss:
    return Loss(
        kind=random.randrange(6),
        metric=random.choice(("", "", "accuracy", "kept", "read")),
        others=random.random() < 0.4,
        counted=random.random() < 0.2,
        penalty=random.random() < 0.15,
    )


def text_of(program: Program) -> str:
    """Return a program as text, in one line."""
    return msgspec.json.encode(program).decode()


def from_text(text: str) -> Program:
    """Return the program that a text says.

    Raises:
        msgspec.ValidationError: It says none.
    """
    return msgspec.json.decode(text, type=Program)
