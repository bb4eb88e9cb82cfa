// Work in chunks on XLA's thread pool: whichever thread is free takes the next chunk.
//
// Which thread computes a chunk must not change its result, so that results are the same bits for any number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace fewbit {

// How the processor treats subnormal numbers and rounds. The threads of XLA's pool flush subnormals and the thread that calls
// may not, so a chunk computes in the mode of its caller, whoever runs it.
class FloatMode {
 public:
#if defined(__x86_64__)
  static FloatMode Current() { return FloatMode(__builtin_ia32_stmxcsr()); }
  void Enter() const { __builtin_ia32_ldmxcsr(static_cast<unsigned>(bits_)); }
#elif defined(__aarch64__)
  static FloatMode Current() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return FloatMode(bits);
  }
  void Enter() const { asm volatile("msr fpcr, %0" : : "r"(bits_)); }
#else
  static FloatMode Current() { return FloatMode(0); }
  void Enter() const {}
#endif

 private:
  explicit FloatMode(uint64_t bits) : bits_(bits) {}
  uint64_t bits_;
};

// What the threads of one call share. It outlives the call: a task that XLA starts late finds no chunk left, and `work` gone.
struct Chunks {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  int64_t count = 0;
  std::mutex mutex;
  std::condition_variable all_done;

  template <typename Work>
  void TakeAll(const Work* work) {
    for (int64_t chunk; (chunk = next.fetch_add(1)) < count;) {
      (*work)(chunk);
      if (done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  }
};

// Calls `work(chunk)` for each chunk below `count`, on this thread and at most `count - 1` others; returns when all are done.
//
// This thread works too and waits only for chunks that others have begun, so that a pool all of whose threads stand here
// goes on.
template <typename Work>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  int64_t helpers = pool.num_threads() - 1;
  if (helpers > count - 1) helpers = count - 1;
  if (helpers <= 0) {
    for (int64_t chunk = 0; chunk < count; ++chunk) work(chunk);
    return;
  }
  auto chunks = std::make_shared<Chunks>();
  chunks->count = count;
  const Work* shared_work = &work;
  const FloatMode mode = FloatMode::Current();
  for (int64_t i = 0; i < helpers; ++i) {
    pool.Schedule([chunks, shared_work, mode] {
      const FloatMode own = FloatMode::Current();
      mode.Enter();
      chunks->TakeAll(shared_work);
      own.Enter();
    });
  }
  chunks->TakeAll(shared_work);
  std::unique_lock<std::mutex> lock(chunks->mutex);
  chunks->all_done.wait(lock, [&] { return chunks->done.load() == chunks->count; });
}

}  // namespace fewbit
