// Scratch memory of a thread, and large pages for results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fewbit {

// Memory of this thread, from a cache line on, that keeps its size from call to call, so that no page is touched for the first
// time twice. The next call on this thread takes it again.
[[maybe_unused]] static float* Workspace(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

// Memory of a call, or of one chunk of it, for one `Use`: a thread may hold one of each use at a time. The thread keeps it for
// the next call while it is small. Fresh pages cost 1 ms of a core for each MiB, and memory that is freed each time may go back
// to the system: the quantizer of a row of 1536 numbers took 10 us so, of which 0.4 us were work.
template <typename Use>
class CallMemory {
 public:
  explicit CallMemory(int64_t bytes) {
    constexpr int64_t kMost = 8 << 20;
    thread_local std::vector<char> kept;
    if (bytes > kMost) own_.reset(new char[bytes]);
    else if (static_cast<int64_t>(kept.size()) < bytes) kept.resize(bytes);
    data_ = bytes > kMost ? own_.get() : kept.data();
  }
  char* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  std::unique_ptr<char[]> own_;
  char* data_;
};

// Asks for pages of 2 MiB in `bytes` from `begin` on, where whole ones fit, before all of it is written.
//
// A fresh array costs a fault for each page of 4 KiB, which takes longer than to fill it. Advice only: memory that has its
// pages already keeps them, and a system that grants no such pages gives small ones as before.
inline void PreferLargePages(void* begin, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes) & ~(kPage - 1);
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)bytes;
#endif
}

}  // namespace fewbit
