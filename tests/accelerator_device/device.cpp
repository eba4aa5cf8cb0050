// An accelerator that lives on the CPU: torch's PrivateUse1 device, with host memory and the CPU's kernels.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "autocast.h"
#include "recurrent.h"
#include "runtime.h"

namespace acc {

// Operators whose arguments may live on the CPU beside those on acc, as CUDA's may.
const std::set<std::string> kMixing = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
    "aten::_unsafe_index_put", "aten::_foreach_copy_", "aten::_pack_padded_sequence", "aten::_ctc_loss",
    "aten::_copy_from", "aten::_copy_from_and_resize"};

// One operator's call: its tensors on acc as CPU tensors with the same memory, and its results back on acc.
class Call {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().is_cpu()) {
      foreign_.push_back(tensor);
      return tensor;
    }
    TORCH_CHECK(
        tensor.is_privateuseone() && tensor.layout() == at::kStrided && tensor.has_storage(),
        "acc can't compute with a tensor of ", tensor.toString(), " on ", tensor.device());
    for (const auto& [own, cpu] : tensors_) {
      if (own.is_same(tensor)) {
        return cpu;
      }
    }
    tensors_.emplace_back(tensor, like(tensor, alias(tensor.storage()), c10::DispatchKey::CPU));
    return tensors_.back().second;
  }

  c10::Storage alias(const c10::Storage& storage) {
    for (const auto& [own, cpu] : storages_) {
      if (own.is_alias_of(storage)) {
        return cpu;
      }
    }
    auto* kept = new c10::Storage(storage);  // should a kernel keep its argument
    c10::DataPtr data(
        const_cast<void*>(storage.data()), kept, [](void* context) { delete static_cast<c10::Storage*>(context); },
        c10::Device(c10::DeviceType::CPU));
    c10::Storage cpu(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
    storages_.emplace_back(storage, cpu);
    return cpu;
  }

  // Gives arguments what the kernel did to them besides their values: new sizes, memory or storages.
  void finish() {
    for (size_t i = 0, count = storages_.size(); i < count; ++i) {
      auto [own, cpu] = storages_[i];
      if (cpu.data() != own.data() || cpu.nbytes() != own.nbytes()) {
        auto data = device_memory().allocate(cpu.nbytes());
        if (cpu.nbytes()) {
          std::memcpy(data.get(), cpu.data(), cpu.nbytes());
        }
        own.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
        own.unsafeGetStorageImpl()->set_nbytes(cpu.nbytes());
      }
    }
    for (const auto& [own, cpu] : tensors_) {
      auto* tensor = own.unsafeGetTensorImpl();
      auto storage = to_device(cpu.storage());
      if (!storage.is_alias_of(own.storage())) {
        tensor->set_storage_keep_dtype(storage);
      }
      if (own.sizes() != cpu.sizes() || own.strides() != cpu.strides() ||
          own.storage_offset() != cpu.storage_offset()) {
        tensor->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      }
    }
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) {
      return tensor;
    }
    for (const auto& [own, cpu] : tensors_) {
      if (cpu.is_same(tensor)) {
        return own;
      }
    }
    for (const auto& other : foreign_) {
      if (other.is_same(tensor) || other.is_alias_of(tensor)) {
        return tensor;
      }
    }
    if (tensor._is_zerotensor()) {  // has sizes without memory
      return to_device(at::zeros(tensor.sizes(), tensor.options()));
    }
    TORCH_CHECK(tensor.layout() == at::kStrided, "acc has no tensors of layout ", tensor.layout());
    return like(tensor, to_device(tensor.storage()), c10::DispatchKey::PrivateUse1);
  }

  void check_devices(const std::string& name) const {
    if (tensors_.empty() || kMixing.count(name)) {
      return;
    }
    for (const auto& other : foreign_) {
      TORCH_CHECK(
          other.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, acc:0 and ",
          other.device(), "! (when calling ", name, ")");
    }
  }

 private:
  c10::Storage to_device(const c10::Storage& storage) {
    for (const auto& [own, cpu] : storages_) {
      if (cpu.is_alias_of(storage)) {
        return own;
      }
    }
    auto data = device_memory().allocate(storage.nbytes());
    if (storage.nbytes()) {
      std::memcpy(data.get(), storage.data(), storage.nbytes());
    }
    c10::Storage own(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &device_memory(), /*resizable=*/true);
    storages_.emplace_back(own, storage);
    return own;
  }

  static at::Tensor like(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
    auto* implementation = made.unsafeGetTensorImpl();
    implementation->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      implementation->set_wrapped_number(true);
    }
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // on acc, on the CPU
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::vector<at::Tensor> foreign_;  // arguments that were on the CPU
};

// While it lives, the CPU's default generator is at the state of acc's: for kernels that take no generator.
class Swapped {
 public:
  Swapped() : lock_(mutex()), cpu_(at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl()) {
    saved_ = cpu_->get_state();
    cpu_->set_state(*default_generator().unsafeGetGeneratorImpl()->get_state());
  }

  ~Swapped() {
    default_generator().unsafeGetGeneratorImpl()->set_state(*cpu_->get_state());
    cpu_->set_state(*saved_);
  }

 private:
  static std::recursive_mutex& mutex() {
    static auto* shared = new std::recursive_mutex;
    return *shared;
  }

  std::lock_guard<std::recursive_mutex> lock_;
  c10::GeneratorImpl* cpu_;
  c10::intrusive_ptr<c10::TensorImpl> saved_;
};

// Runs any operator: the CPU's kernel on the same memory.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // What the kernel calls belongs to this operator: it is neither recorded nor cast.
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& schema = op.schema();
  const auto& parameters = schema.arguments();
  const size_t begin = stack->size() - parameters.size();
  Call call;
  bool stays_on_cpu = false, is_seeded = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isDevice()) {
      stays_on_cpu = value.toDevice().is_cpu();
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isStorage()) {
      auto storage = value.toStorage();
      value = storage.device().is_cpu() ? storage : call.alias(storage);
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device() == device(), "Expected a 'acc' device type for generator but found '",
          generator.device().type(), "'");
      value = Generator::numbers_of(generator);
      is_seeded = true;
    } else if (value.isNone() && parameters[i].name() == "generator") {
      value = Generator::numbers_of(default_generator());
      is_seeded = true;
    } else {
      value = map_tensors(value, [&](const at::Tensor& tensor) { return call.to_cpu(tensor); });
    }
  }
  call.check_devices(schema.name());
  std::optional<Swapped> swapped;
  if (!is_seeded && op.hasTag(at::Tag::nondeterministic_seeded)) {
    swapped.emplace();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.finish();
  if (stays_on_cpu) {
    return;
  }
  const size_t returned = stack->size() - schema.returns().size();
  const bool has_sizes = schema.name() == "aten::_pack_padded_sequence";  // on the CPU, whatever the data's device
  for (size_t i = returned; i < stack->size() - has_sizes; ++i) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& tensor) { return call.to_device(tensor); });
  }
}

void check_device(std::optional<c10::Device> where) {
  TORCH_CHECK(!where || where->index() <= 0, "invalid device ordinal: there is no ", where->str(), ", only acc:0");
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_device(where);
  return at::detail::empty_generic(
      size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> where, std::optional<bool>) {
  check_device(where);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Copies between acc and the CPU in either direction, or within acc.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call;
  call.to_cpu(target).copy_(call.to_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call;
  auto to = call.to_cpu(target);
  to.resize_(source.sizes());
  to.copy_(call.to_cpu(source));
  call.finish();
  return target;
}

// Kept values times 1 / (1 - p), rounded as the CPU's dropout rounds it, which has a mask of floats.
at::Tensor scaled(const at::Tensor& tensor, const at::Tensor& mask, double kept) {
  return tensor.mul(mask.to(tensor.scalar_type()).div_(kept));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call;
  auto values = call.to_cpu(input);
  auto options = values.options().dtype(at::kBool);
  if (!train.value_or(true)) {
    return {call.to_device(values.clone()), call.to_device(at::ones_like(values, options))};
  }
  if (p == 1) {
    return {call.to_device(at::zeros_like(values)), call.to_device(at::zeros_like(values, options))};
  }
  auto mask = at::empty_like(values, options).bernoulli_(1 - p, Generator::numbers_of(default_generator()));
  return {call.to_device(scaled(values, mask, 1 - p)), call.to_device(mask)};
}

at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call;
  auto values = call.to_cpu(gradient);
  return call.to_device(scale == 0 ? at::zeros_like(values) : scaled(values, call.to_cpu(mask), 1 / scale));
}

void record_stream(at::Tensor&, c10::Stream) {}

// The CPU's choice between its kernels of attention, from sizes alone: fake tensors ask too.
int64_t attention_choice(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool is_causal, std::optional<double> scale, bool has_groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto sized = [](const at::Tensor& tensor) {
    auto made = at::detail::empty_strided_generic(
        tensor.sizes(), tensor.strides(), c10::GetAllocator(c10::DeviceType::Meta),
        c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.scalar_type());
    return at::Tensor(std::move(made)).set_requires_grad(tensor.requires_grad());
  };
  auto sized_mask = mask && mask->defined() ? std::optional<at::Tensor>(sized(*mask)) : std::nullopt;
  static auto choose = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("aten::_fused_sdp_choice", "")
                           .typed<int64_t(
                               const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool)>();
  return choose.redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CPU), sized(query), sized(key), sized(value), sized_mask, dropout,
      is_causal, scale, has_groups);
}

const std::set<std::string> kNative = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::_copy_from", "aten::_copy_from_and_resize",
    "aten::native_dropout", "aten::native_dropout_backward", "aten::record_stream"};

// Composite operators that choose another kernel where the device isn't the CPU.
const std::vector<const char*> kComposite = {
    "convolution", "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("native_dropout", &native_dropout);
  m.impl("native_dropout_backward", &native_dropout_backward);
  m.impl("record_stream", &record_stream);
  for (const char* name : kComposite) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  // Where the CPU has a kernel, a composite one for other devices would round differently.
  for (const auto& name : registered(c10::DispatchKey::CPU)) {
    auto full = c10::toString(name);
    if (!kNative.count(full)) {
      m.impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

// Copies resolve these lazy operations themselves; resolving them before would take a copy, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool is_registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory());
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace acc

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &acc::attention_choice)
}  // namespace at::native

extern "C" {
void acc_set_total(size_t bytes) {
  acc::device_memory().set_total(bytes);
}

void acc_set_fraction(double fraction) {
  acc::device_memory().set_fraction(fraction);
}

void acc_give_default_generator() {
  acc::gives_default_generator = true;
}

double acc_get_fraction() {
  return acc::device_memory().fraction();
}
}
