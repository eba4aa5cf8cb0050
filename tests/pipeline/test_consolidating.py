"""The model of a run in whole tensors, whoever wrote its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

from memfit import pipeline
from memfit.errors import CheckpointError, OutputError
from tests.processes import on_ranks
from tests.ranks.trainings import HYBRID, Model, fit


def trained(rank: int, out: Path) -> Iterator[Any]:
    yield fit(HYBRID, out, steps=2)[0]["model"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("run") / "out"
    return out, on_ranks(4, trained, out)[0][0]


def test_a_model_in_shards_is_written_whole(run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    out, expected = run
    assert pipeline.consolidate(out, tmp_path / "whole") == tmp_path / "whole"
    model = Model()
    load_model(model, tmp_path / "whole" / "model.safetensors")
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(OutputError, match="has model.safetensors already"):
        pipeline.consolidate(out, tmp_path / "whole")


def test_a_large_model_gets_several_files_and_an_index(
    run: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    out, expected = run
    pipeline.consolidate(out / "checkpoint-2", tmp_path, max_file_bytes=500)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert len(names) > 1 and names == {path.name for path in tmp_path.glob("*.safetensors")}
    found = {key: tensor for name in names for key, tensor in load_file(tmp_path / name).items()}
    assert found.keys() == expected.keys() - {"head.weight"}
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
    pipeline.consolidate(out, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_transformers_reads_it(tmp_path: Path) -> None:
    """From a run of one process, whose file is whole already, in several files."""
    transformers = pytest.importorskip("transformers")
    from memfit.training import BatchStream, Step
    from memfit.training.runs import checkpoint
    from memfit.workload import Workload
    from tests.training.conftest import make_plan

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(16, (2, 4))
    given = Workload(
        model, tokens, lambda m, x: m(x, labels=x).loss, torch.optim.SGD(model.parameters(), 0.1), name="gpt2"
    )
    step = Step(given)
    step(tokens)
    checkpoint.Writing(tmp_path / "run", step, make_plan(given), BatchStream(given).position()).finish()
    whole = pipeline.consolidate(tmp_path / "run", tmp_path / "whole", max_file_bytes=1000)
    model.config.save_pretrained(whole)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(whole)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_without_a_checkpoint_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        pipeline.consolidate(tmp_path, tmp_path / "whole")
