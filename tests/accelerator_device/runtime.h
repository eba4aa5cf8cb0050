// What torch asks of a device apart from memory and operators: generators, streams, events and hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>

#include "memory.h"

namespace acc {

// A generator whose numbers are those of a CPU generator that nobody else draws from.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(at::Generator numbers)
      : c10::GeneratorImpl(acc::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), numbers_(std::move(numbers)) {}

  static at::Generator make() {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }

  static at::Generator numbers_of(const at::Generator& generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->numbers_;
  }

  void set_current_seed(uint64_t seed) override {
    numbers_.set_current_seed(seed);
  }

  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "generators of acc have no offset");
  }

  uint64_t get_offset() const override {
    TORCH_CHECK(false, "generators of acc have no offset");
  }

  uint64_t current_seed() const override {
    return numbers_.current_seed();
  }

  uint64_t seed() override {
    return numbers_.unsafeGetGeneratorImpl()->seed();
  }

  void set_state(const c10::TensorImpl& state) override {
    numbers_.unsafeGetGeneratorImpl()->set_state(state);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    return new Generator(numbers_.clone());
  }

  at::Generator numbers_;
};

inline const at::Generator& default_generator() {
  static auto* generator = new at::Generator(Generator::make());
  return *generator;
}

// Whether the next generator that Python makes is the default one, which it has no other way to reach.
inline std::atomic<bool> gives_default_generator{false};

inline thread_local c10::StreamId current_stream = 0;

// One device that has always finished its work: streams are numbers, and events are times.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Time = std::chrono::steady_clock::time_point;

  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }

  c10::Device exchangeDevice(c10::Device other) const override {
    setDevice(other);
    return device();
  }

  c10::Device getDevice() const override {
    return device();
  }

  void setDevice(c10::Device other) const override {
    TORCH_CHECK(other.index() <= 0, "invalid device ordinal: there is no ", other.str(), ", only acc:0");
  }

  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device(), current_stream);
  }

  c10::Stream getDefaultStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device());
  }

  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return getNewStream(device(), 0);
  }

  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, device(), ++last);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, device(), std::exchange(current_stream, stream.id()));
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Time*>(event);
  }

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Time;
    }
    *static_cast<Time*>(*event) = std::chrono::steady_clock::now();
  }

  void block(void*, const c10::Stream&) const override {}

  bool queryEvent(void*) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  bool queryStream(const c10::Stream&) const override {
    return true;
  }

  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(*static_cast<Time*>(end) - *static_cast<Time*>(start)).count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return 1;
  }

  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard().setDevice(c10::Device(c10::DeviceType::PrivateUse1, index));
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    setCurrentDevice(index);
    return 0;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }

  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return gives_default_generator.exchange(false) ? default_generator() : Generator::make();
  }

  c10::Device getDeviceFromPtr(void*) const override {
    return device();
  }

  bool isPinnedPtr(const void* data) const override {
    return pinned_memory().holds(data);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* implementation = storage.unsafeGetStorageImpl();
    TORCH_CHECK(implementation->resizable(), "Trying to resize storage that is not resizable");
    auto data = device_memory().allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) {
      std::memcpy(data.get(), storage.data_ptr().get(), kept);
    }
    implementation->set_data_ptr_noswap(std::move(data));
    implementation->set_nbytes(bytes);
  }
};

}  // namespace acc
