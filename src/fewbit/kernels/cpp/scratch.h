// Scratch memory of a chunk of work.
#pragma once

#include <cstdint>
#include <vector>

namespace fewbit {

// Memory of this thread, from a cache line on, that keeps its size from call to call, so that no page is touched for the first
// time twice. The next call on this thread takes it again.
static float* Workspace(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

}  // namespace fewbit
