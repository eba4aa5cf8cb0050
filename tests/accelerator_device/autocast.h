// Autocast on the device: each operator in the precision that it has on the CPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

namespace at::autocast {  // ATen/autocast_mode.h declares these, and includes every operator
TORCH_API Tensor cached_cast(ScalarType, const Tensor&, c10::DeviceType);
TORCH_API ScalarType get_autocast_dtype(DeviceType);
}  // namespace at::autocast

namespace acc {

template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(function(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(function(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

std::vector<c10::OperatorName> registered(c10::DispatchKey key) {
  std::vector<c10::OperatorName> names;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
    if (name.name.rfind("aten::", 0) == 0) {
      names.push_back(name);
    }
  }
  return names;
}

const std::set<std::string> kLowered = {
    "aten::conv1d", "aten::conv1d.padding", "aten::conv2d", "aten::conv2d.padding", "aten::conv3d",
    "aten::conv3d.padding", "aten::bmm", "aten::mm", "aten::linalg_vecdot", "aten::baddbmm", "aten::addmm",
    "aten::_addmm_activation", "aten::addbmm", "aten::linear", "aten::_convolution.deprecated", "aten::matmul",
    "aten::conv_tbc", "aten::mkldnn_rnn_layer", "aten::conv_transpose1d", "aten::conv_transpose2d.input",
    "aten::conv_transpose3d.input", "aten::prelu", "aten::scaled_dot_product_attention",
    "aten::_native_multi_head_attention"};
const std::set<std::string> kPromoted = {"aten::stack", "aten::cat", "aten::index_copy"};

template <typename Choose>
void run_cast(const c10::OperatorHandle& op, torch::jit::Stack* stack, Choose choose) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const size_t begin = stack->size() - op.schema().arguments().size();
  const at::ScalarType dtype = choose(begin);
  for (size_t i = begin; i < stack->size(); ++i) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, c10::DeviceType::PrivateUse1);
    });
  }
  op.callBoxed(stack);
}

void run_lowered(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cast(op, stack, [](size_t) { return at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1); });
}

void run_in_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cast(op, stack, [](size_t) { return at::kFloat; });
}

void run_promoted(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_cast(op, stack, [stack](size_t begin) {
    auto widest = at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1);
    for (size_t i = begin; i < stack->size(); ++i) {
      map_tensors((*stack)[i], [&](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.is_privateuseone() && tensor.scalar_type() == at::kFloat) {
          widest = at::kFloat;
        }
        return tensor;
      });
    }
    return widest;
  });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// What autocast does to an operator on the CPU, it does on acc.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto& name : registered(c10::DispatchKey::AutocastCPU)) {
    auto full = c10::toString(name);
    auto kernel = kLowered.count(full) ? torch::CppFunction::makeFromBoxedFunction<&run_lowered>()
        : kPromoted.count(full)        ? torch::CppFunction::makeFromBoxedFunction<&run_promoted>()
                                       : torch::CppFunction::makeFromBoxedFunction<&run_in_float>();
    m.impl(full.substr(6).c_str(), std::move(kernel));
  }
}

}  // namespace acc
