// Scratch memory of a thread, and large pages for results.
#pragma once

#include <cstddef>
#include <cstdint>
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
