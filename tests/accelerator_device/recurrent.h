// The cells of LSTM and GRU, which torch takes as single operators on every device but the CPU.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

namespace acc {

inline at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates.add(*bias) : gates;
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto gates = with_bias(hidden, hidden_bias).add(with_bias(input, input_bias)).unsafe_chunk(4, 1);
  auto cy = gates[1].sigmoid().mul(cell).add(gates[0].sigmoid().mul(gates[2].tanh()));
  return {gates[3].sigmoid().mul(cy.tanh()), cy, at::empty({0}, cell.options())};
}

inline std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& before,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto from_input = with_bias(input, input_bias).unsafe_chunk(3, 1);
  auto from_hidden = with_bias(hidden, hidden_bias).unsafe_chunk(3, 1);
  auto reset = from_hidden[0].add(from_input[0]).sigmoid();
  auto kept = from_hidden[1].add(from_input[1]).sigmoid();
  auto fresh = from_input[2].add(from_hidden[2].mul(reset)).tanh();
  return {before.sub(fresh).mul(kept).add(fresh), at::empty({0}, before.options())};
}

// Made of other operators, whose gradients torch knows.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

}  // namespace acc
