// Carries out requests from standard input with PyTorch's own caching allocator, and prints what it counts after each.
// "at REGION OFFSET": where a block lies; a region is what was asked of the device at once, counted from 0.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <iostream>
#include <unistd.h>
#include <vector>
extern "C" uint64_t stub_region[];
extern "C" int stub_regions;
namespace A = c10::cuda::CUDACachingAllocator;
int main() {
  auto* a = A::get();
  c10::cuda::detail::init_p2p_access_cache(1);
  a->init(1);
  std::vector<void*> live;
  std::string kind;
  uint64_t number, stream;
  while (std::cin >> kind >> number >> stream) {
    if (kind == "malloc") {
      try {
        void* p = a->raw_alloc_with_stream(number, (cudaStream_t)stream);
        live.push_back(p);
        int r = stub_regions - 1;
        while (stub_region[r] > (uint64_t)p) r--;
        std::cout << "at " << r << " " << (uint64_t)p - stub_region[r] << "\n";
      } catch (const c10::OutOfMemoryError&) { std::cout << "oom\n"; }
    } else if (kind == "free" && !live.empty()) {
      size_t i = number % live.size();
      void* p = live[i];
      live.erase(live.begin() + i);
      a->raw_delete(p);
    } else if (kind == "empty") {
      a->emptyCache({0, 0});
    }
    auto s = a->getDeviceStats(0);
    std::cout << "is " << s.allocated_bytes[0].current << " " << s.reserved_bytes[0].current << " " << s.requested_bytes[0].current
              << " " << s.allocated_bytes[0].peak << " " << s.reserved_bytes[0].peak << " " << s.requested_bytes[0].peak << " "
              << s.num_alloc_retries << " " << s.num_ooms << "\n";
  }
  std::cout.flush();
  _exit(0);
}
