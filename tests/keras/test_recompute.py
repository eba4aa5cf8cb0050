from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memfit.errors import UsageError, WorkloadError
from memfit.keras import checkpoint_every, measured_peak
from memfit.keras.recompute import Recomputed, graph_of
from tests.keras.models import difference, keras, layers, mlp, resnet, tf, unet, values_after_step, workload


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_the_peak_falls_and_gradients_stay(run_eagerly: bool) -> None:
    model = mlp(depth=16)
    mine = workload(model, 4096, run_eagerly=run_eagerly)
    lean = checkpoint_every(model, 4)
    assert [id(v) for v in lean.trainable_variables] == [id(v) for v in model.trainable_variables]
    (loss, plain), (lean_loss, planned) = mine.step(model)(), mine.step(lean)()
    # A function's matrix product is fused with its GELU where no backward pass needs what is between.
    assert difference([loss, *plain], [lean_loss, *planned]) <= (0.0 if run_eagerly else 1e-5)
    peaks = [measured_peak(mine.step(one)) for one in (model, lean)]
    print(f"{peaks[0] / 2**20:.1f} MiB plain, {peaks[1] / 2**20:.1f} MiB, {peaks[1] / peaks[0]:.2f}")
    assert peaks[1] <= 0.6 * peaks[0]


@pytest.mark.parametrize("run_eagerly", [True, False])
@pytest.mark.parametrize("make", [resnet, unet])
def test_branches_dropout_and_statistics_are_as_in_the_plain_step(make: Any, run_eagerly: bool) -> None:
    plain, *others = (
        values_after_step(make, lambda m, k=k: checkpoint_every(m, k) if k else m, 4, run_eagerly=run_eagerly)
        for k in (0, 3, 100)
    )
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(plain, other, strict=True))


def test_without_the_first_state_dropout_would_be_wrong() -> None:
    """The comparison of gradients tells: `tf.recompute_grad` by itself draws other numbers."""
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64), layers.Dropout(0.5, seed=1), layers.Dense(64)])
    x = tf.constant(np.random.RandomState(0).randn(32, 64).astype("float32"))
    generator = model.layers[1].seed_generator.state

    def gradients(call: Any) -> list[Any]:
        generator.assign([1, 0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(call(x) ** 2)
        return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]

    lean = checkpoint_every(model, 3)
    plain = gradients(lambda x: model(x, training=True))
    assert all(np.array_equal(a, b) for a, b in zip(plain, gradients(lambda x: lean(x, training=True)), strict=True))
    by_hand = gradients(tf.recompute_grad(lambda x: model(x, training=True)))
    assert not all(np.array_equal(a, b) for a, b in zip(plain, by_hand, strict=True))


def test_a_compiled_model_is_fit() -> None:
    trained = []
    for k in (0, 3):
        model = resnet(blocks=2)
        one = checkpoint_every(model, k) if k else model
        one.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        x = np.random.RandomState(0).randn(16, 32, 32, 3).astype("float32")
        one.fit(x, np.arange(16) % 10, batch_size=8, epochs=2, shuffle=False, verbose=0)
        trained.append([v.numpy() for v in model.variables])
    assert all(np.array_equal(a, b) for a, b in zip(*trained, strict=True))


def test_a_frozen_layer_is_recomputed() -> None:
    model = mlp(depth=4)
    model.layers[1].trainable = False
    lean = checkpoint_every(model, 4)
    assert [len(piece.layers) for piece in lean.layers if isinstance(piece, Recomputed)] == [4]
    (_, plain), (_, planned) = (workload(model, 8).step(one)() for one in (model, lean))
    assert len(plain) == len(planned) == 6


def test_shared_layers_several_inputs_and_outputs_and_integers() -> None:
    tokens, x = keras.Input((6,), dtype="int32", name="tokens"), keras.Input((6, 8), name="x")
    embedded = layers.Embedding(10, 8)(tokens)
    shared = layers.Dense(8, activation="tanh")
    y = shared(shared(embedded) + x)
    model = keras.Model({"tokens": tokens, "x": x}, [layers.Dense(2)(y), y])
    random = np.random.RandomState(0)
    batch = {"tokens": random.randint(0, 10, (4, 6)), "x": random.randn(4, 6, 8).astype("float32")}
    found = []
    for one in (model, checkpoint_every(model, 3), checkpoint_every(model, 10)):
        with tf.GradientTape() as tape:
            first, second = one(batch)
            loss = tf.reduce_mean(first**2) + tf.reduce_mean(second)
        found.append([tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, model.trainable_variables)])
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_layers_with_masks_or_losses_end_a_run() -> None:
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 8, mask_zero=True)(tokens)
    x = layers.Dense(8, activity_regularizer="l2")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(tokens, layers.Dense(2)(layers.Dense(8)(x)))
    lean = checkpoint_every(model, 5)
    assert [len(piece.layers) for piece in lean.layers if isinstance(piece, Recomputed)] == [2]
    ids = np.array([[1, 2, 3, 0, 0, 0]])
    assert np.array_equal(model(ids).numpy(), lean(ids).numpy())
    assert len(lean.losses) == 1


def test_names_are_the_same_in_every_process() -> None:
    shared = layers.Dense(4, name="mine")
    inputs = keras.Input((4,))
    x = layers.Dense(4)(shared(layers.Dense(4)(shared(inputs)))) + inputs
    graph = graph_of(keras.Model(inputs, layers.ReLU()(x)))
    assert [unit.name for unit in graph.units] == ["mine", "dense", "mine#2", "dense_1", "add", "re_lu"]


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="k=0"):
        checkpoint_every(mlp(depth=2), 0)
    with pytest.raises(WorkloadError, match="can't see the layer calls"):
        checkpoint_every(keras.Sequential([layers.Dense(2)]), 2)


def test_a_device_whose_memory_nothing_counts_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> None:
        raise ValueError(f"Cannot reset memory stats for device '{device}'")

    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", refuse)
    with pytest.raises(UsageError, match="TF_ENABLE_ONEDNN_OPTS=1"):
        measured_peak(lambda: None)
