// Work in chunks on as many threads as XLA has: each thread has a share of them, and takes from the others' when it is done.
//
// The threads are our own. XLA runs independent operations on those of its pool, and a helper that waits there for the next
// call would keep them waiting.
//
// Which thread computes a chunk must not change its result, so that results are the same bits for any number of threads.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

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

// Tells the processor that this thread spins.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks at `is_so` again and again for 100 us, and lets others run meanwhile; returns what it saw last.
template <typename Condition>
bool IsSoSoon(const Condition& is_so) {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 32; ++i) {
      if (is_so()) return true;
      Pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(100));
  return is_so();
}

// What the threads of one call share. It outlives the call: a thread that comes late finds no chunk left, and `work` gone.
//
// Each thread has a share of neighbouring chunks, contiguous in memory, so that what it asks for ahead is its
// own; whoever has none left takes from the others.
struct Chunks {
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  Chunks(int64_t count, int64_t threads) : count(count), threads(threads), shares(new Share[threads]) {
    for (int64_t i = 0; i < threads; ++i) shares[i].next = count * i / threads, shares[i].end = count * (i + 1) / threads;
  }

  const int64_t count, threads;
  const std::unique_ptr<Share[]> shares;
  std::atomic<int64_t> joined{0};
  std::atomic<int64_t> done{0};
  const void* work = nullptr;
  void (*run)(const void* work, int64_t chunk) = nullptr;
  FloatMode mode = FloatMode::Current();
  std::mutex mutex;
  std::condition_variable all_done;

  bool AreDone() const { return done.load(std::memory_order_acquire) == count; }

  void TakeAll() {
    const int64_t first = joined.fetch_add(1);
    for (int64_t i = 0; i < threads; ++i) {
      Share& share = shares[(first + i) % threads];
      int64_t taken = 0;
      for (int64_t chunk; (chunk = share.next.fetch_add(1)) < share.end; ++taken) run(work, chunk);
      if (taken != 0 && done.fetch_add(taken) + taken == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  }

  // Whoever waits looks for a while before it sleeps: to wake a thread takes longer than many a call.
  void WaitUntilDone() {
    if (IsSoSoon([&] { return AreDone(); })) return;
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [&] { return AreDone(); });
  }
};

// The threads that help, and where the latest call is posted for them. A program makes hundreds of short calls one after the
// other, and to wake a sleeping thread for each would cost more than the call: so a thread looks for the next call for a while
// before it sleeps. It is never destroyed, since its threads look at it until the process ends.
//
// Two extensions whose threads looked for calls of their own would take the core from each other. So the class is visible:
// GCC then makes the variable in Get unique in the process, whichever extension asks first. (Where it is not, as with Clang,
// each extension has threads of its own, which costs time and nothing else.)
class __attribute__((visibility("default"))) Helpers {
 public:
  static Helpers& Get() {
    static Helpers* const helpers = new Helpers;
    return *helpers;
  }

  // Posts a call that `count` threads may help with.
  void Post(const std::shared_ptr<Chunks>& chunks, int64_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    latest_ = chunks;
    const uint64_t before = ticket_.fetch_add(1);
    for (; threads_ < count; ++threads_) std::thread([this, before] { Serve(before); }).detach();
    const int64_t asleep = asleep_;
    lock.unlock();
    for (int64_t i = 0; i < asleep && i < count; ++i) posted_.notify_one();
  }

 private:
  void Serve(uint64_t seen) {
    for (;;) {
      const bool is_posted = IsSoSoon([&] { return ticket_.load() != seen; });
      std::unique_lock<std::mutex> lock(mutex_);
      if (!is_posted) {
        ++asleep_;
        posted_.wait(lock, [&] { return ticket_.load() != seen; });
        --asleep_;
      }
      seen = ticket_.load();
      const std::shared_ptr<Chunks> chunks = latest_;
      lock.unlock();
      chunks->mode.Enter();
      chunks->TakeAll();
    }
  }

  std::mutex mutex_;
  std::condition_variable posted_;
  std::shared_ptr<Chunks> latest_;
  std::atomic<uint64_t> ticket_{0};
  int64_t threads_ = 0, asleep_ = 0;
};

// Calls `work(chunk)` for each chunk below `count`, on this thread and at most `count - 1` others; returns when all are done.
//
// This thread works too and waits only for chunks that others have begun.
template <typename Work>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  int64_t helpers = pool.num_threads() - 1;
  if (helpers > count - 1) helpers = count - 1;
  if (helpers <= 0) {
    for (int64_t chunk = 0; chunk < count; ++chunk) work(chunk);
    return;
  }
  auto chunks = std::make_shared<Chunks>(count, helpers + 1);
  chunks->work = &work;
  chunks->run = [](const void* shared, int64_t chunk) { (*static_cast<const Work*>(shared))(chunk); };
  Helpers::Get().Post(chunks, helpers);
  chunks->TakeAll();
  chunks->WaitUntilDone();
}

}  // namespace fewbit
