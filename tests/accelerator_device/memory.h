// The memory of the device: blocks of host memory that are counted, cached and limited as a GPU's are.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <sstream>
#include <vector>

namespace acc {

constexpr size_t kRounding = 512;
constexpr size_t kSmall = 1 << 20;  // torch counts blocks below it in the small pool

inline c10::Device device() {
  return c10::Device(c10::DeviceType::PrivateUse1, 0);
}

inline std::string readable(size_t bytes) {
  std::ostringstream text;
  text.precision(2);
  text << std::fixed;
  if (bytes < (1 << 20)) {
    text << bytes / 1024.0 << " KiB";
  } else if (bytes < (1 << 30)) {
    text << bytes / 1048576.0 << " MiB";
  } else {
    text << bytes / 1073741824.0 << " GiB";
  }
  return text.str();
}

// Hands out blocks and keeps freed ones for requests of the same size, until the limit needs their bytes.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    if (requested == 0) {
      return {nullptr, nullptr, &free_block, device()};
    }
    std::lock_guard<std::mutex> lock(mutex_);
    size_t size = (requested + kRounding - 1) / kRounding * kRounding;
    auto* block = new Block{take(size), size, requested};
    count(block, +1);
    return {block->data, block, &free_block, device()};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(mutex_);
    release_cache();
  }

  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* statistic : statistics()) {
      for (auto& pool : *statistic) {
        pool.reset_accumulated();
      }
    }
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_device_alloc = stats_.num_device_free = 0;
  }

  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* statistic : statistics()) {
      for (auto& pool : *statistic) {
        pool.reset_peak();
      }
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {total_ - std::min(total_, reserved()), total_};
  }

  void set_total(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    total_ = bytes;
  }

  void set_fraction(double fraction) {
    std::lock_guard<std::mutex> lock(mutex_);
    fraction_ = fraction;
  }

  double fraction() {
    return fraction_;
  }

 private:
  struct Block {
    void* data;
    size_t size;
    size_t requested;
  };

  static void free_block(void* context);

  size_t reserved() const {
    return stats_.reserved_bytes[0].current;
  }

  std::vector<c10::CachingAllocator::StatArray*> statistics() {
    return {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes, &stats_.reserved_bytes,
            &stats_.active_bytes, &stats_.requested_bytes};
  }

  static void change(c10::CachingAllocator::StatArray& statistic, size_t size, size_t amount, int sign) {
    for (auto pool : {size_t(0), size_t(size < kSmall ? 1 : 2)}) {
      sign > 0 ? statistic[pool].increase(amount) : statistic[pool].decrease(amount);
    }
  }

  void count(const Block* block, int sign) {
    change(stats_.allocation, block->size, 1, sign);
    change(stats_.active, block->size, 1, sign);
    change(stats_.allocated_bytes, block->size, block->size, sign);
    change(stats_.active_bytes, block->size, block->size, sign);
    change(stats_.requested_bytes, block->size, block->requested, sign);
    c10::reportMemoryUsageToProfiler(
        block->data, sign * int64_t(block->size), stats_.allocated_bytes[0].current, reserved(), device());
  }

  void* take(size_t size) {
    auto& cached = cache_[size];
    if (!cached.empty()) {
      void* data = cached.back();
      cached.pop_back();
      return data;
    }
    size_t limit = size_t(fraction_ * total_);
    if (reserved() + size > limit) {
      ++stats_.num_alloc_retries;
      release_cache();
    }
    if (reserved() + size > limit) {
      ++stats_.num_ooms;
      refuse(size, limit);
    }
    void* data = std::aligned_alloc(kRounding, size);
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    ++stats_.num_device_alloc;
    change(stats_.segment, size, 1, +1);
    change(stats_.reserved_bytes, size, size, +1);
    return data;
  }

  [[noreturn]] void refuse(size_t size, size_t limit) {
    size_t allocated = stats_.allocated_bytes[0].current;
    std::string allowed = fraction_ < 1 ? readable(limit) + " allowed; " : "";
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "acc out of memory. Tried to allocate ", readable(size),
        ". acc device 0 has a total capacity of ", readable(total_), " of which ",
        readable(total_ - std::min(total_, reserved())), " is free. ", allowed, "Of the allocated memory ",
        readable(allocated), " is allocated by PyTorch, and ", readable(reserved() - allocated),
        " is reserved by PyTorch but unallocated.");
    std::abort();  // never reached: the check throws
  }

  void release_cache() {
    for (auto& [size, cached] : cache_) {
      for (void* data : cached) {
        std::free(data);
        ++stats_.num_device_free;
        change(stats_.segment, size, 1, -1);
        change(stats_.reserved_bytes, size, size, -1);
      }
      cached.clear();
    }
  }

  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> cache_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  size_t total_ = size_t(2) << 30;
  double fraction_ = 1;
};

// Never destroyed: tensors may outlive every static object.
inline DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}

inline void DeviceMemory::free_block(void* context) {
  if (context != nullptr) {
    auto* block = static_cast<Block*>(context);
    auto& memory = device_memory();
    std::lock_guard<std::mutex> lock(memory.mutex_);
    memory.cache_[block->size].push_back(block->data);
    memory.count(block, -1);
    delete block;
  }
}

// Ordinary host memory that is known to be pinned.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, c10::Device(c10::DeviceType::CPU)};
    }
    void* data = std::aligned_alloc(kRounding, (bytes + kRounding - 1) / kRounding * kRounding);
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(data)] = bytes;
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  bool holds(const void* data) {
    auto address = reinterpret_cast<uintptr_t>(data);
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(address);
    return after != blocks_.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }

  void empty_cache() override {}

  at::HostStats get_stats() override {
    return {};
  }

  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void free_block(void* data);

  std::mutex mutex_;
  std::map<uintptr_t, size_t> blocks_;
};

inline PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

inline void PinnedMemory::free_block(void* data) {
  auto& memory = pinned_memory();
  std::lock_guard<std::mutex> lock(memory.mutex_);
  memory.blocks_.erase(reinterpret_cast<uintptr_t>(data));
  std::free(data);
}

}  // namespace acc
