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

// Memory that a call reads from end to end: a weight's codes, scales and zero points.
struct Reads {
  struct Span {
    const char* data = nullptr;
    int64_t bytes = 0;
  };
  Span codes, scales, zeros;
};

// Which memory is read after which, learned from calls: a program of a model makes the same ones again for each token.
class Sequence {
 public:
  // What the call after the one that reads `now` will read, if it was the same the last two times; otherwise nothing. The
  // memory may be gone by then: it is good for prefetching only, which ignores addresses that are not there.
  Reads After(const Reads& now) {
    if (last_ != nullptr) {
      Step& step = StepFrom(last_);
      step.is_proven = step.from == last_ && step.next.codes.data == now.codes.data;
      step.from = last_, step.next = now;
    }
    last_ = now.codes.data;
    const Step& step = StepFrom(last_);
    return step.from == last_ && step.is_proven ? step.next : Reads{};
  }

 private:
  struct Step {
    const char* from = nullptr;
    Reads next;
    bool is_proven = false;
  };
  static constexpr int kBits = 11;  // of a step's place

  Step& StepFrom(const char* address) { return steps_[(reinterpret_cast<uint64_t>(address) * 0x9E3779B97F4A7C15u) >> (64 - kBits)]; }

  std::unique_ptr<Step[]> steps_{new Step[1 << kBits]};
  const char* last_ = nullptr;
};

// Prefetches the beginning of the `share`th of `shares` parts of what will be read, until `is_enough`.
template <typename Condition>
void FetchAhead(const Reads& reads, int64_t share, int64_t shares, const Condition& is_enough) {
  constexpr int64_t kMost = 512 << 10, kAtOnce = 1 << 10, kLine = 64;  // of codes: half of an L2 cache
  const int64_t steps = (reads.codes.bytes / shares + kAtOnce - 1) / kAtOnce;
  for (int64_t step = 0; step < steps && step < kMost / kAtOnce && !is_enough(); ++step) {
    for (const Reads::Span& span : {reads.codes, reads.scales, reads.zeros}) {
      const int64_t first = span.bytes * share / shares, length = span.bytes * (share + 1) / shares - first;
      const char* end = span.data + first + length * (step + 1) / steps;
      for (const char* line = span.data + first + length * step / steps; line < end; line += kLine) __builtin_prefetch(line, 0, 2);
    }
  }
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
  std::atomic<int64_t> done{0};
  const void* work = nullptr;
  void (*run)(const void* work, int64_t chunk) = nullptr;
  FloatMode mode = FloatMode::Current();
  std::mutex mutex;
  std::condition_variable all_done;

  bool AreDone() const { return done.load(std::memory_order_acquire) == count; }

  // All chunks that are left, from the `own`th share on.
  void TakeAll(int64_t own) {
    for (int64_t i = 0; i < threads; ++i) {
      Share& share = shares[(own + i) % threads];
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

  // Posts a call that `count` threads may help with, and that reads `reads`.
  void Post(const std::shared_ptr<Chunks>& chunks, int64_t count, const Reads& reads) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (reads.codes.data != nullptr) upcoming_ = sequence_.After(reads);
    latest_ = chunks;
    const uint64_t before = ticket_.fetch_add(1);
    while (threads_ < count) std::thread([this, before, own = ++threads_] { Serve(before, own); }).detach();
    const int64_t asleep = asleep_;
    lock.unlock();
    for (int64_t i = 0; i < asleep && i < count; ++i) posted_.notify_one();
  }

 private:
  void Serve(uint64_t seen, int64_t own) {
    const auto is_next = [&] { return ticket_.load(std::memory_order_relaxed) != seen; };
    for (;;) {
      const bool is_posted = IsSoSoon(is_next);
      std::unique_lock<std::mutex> lock(mutex_);
      if (!is_posted) {
        ++asleep_;
        posted_.wait(lock, is_next);
        --asleep_;
      }
      seen = ticket_.load();
      const std::shared_ptr<Chunks> chunks = latest_;
      const Reads upcoming = upcoming_;
      const int64_t threads = threads_ + 1;
      lock.unlock();
      chunks->mode.Enter();
      chunks->TakeAll(own);
      FetchAhead(upcoming, own, threads, is_next);
    }
  }

  std::mutex mutex_;
  std::condition_variable posted_;
  std::shared_ptr<Chunks> latest_;
  Sequence sequence_;
  Reads upcoming_;  // by the next call that says what it reads
  std::atomic<uint64_t> ticket_{0};
  int64_t threads_ = 0, asleep_ = 0;
};

// Calls `work(chunk)` for each chunk below `count`, on this thread and at most `count - 1` others; returns when all are done.
//
// This thread works too and waits only for chunks that others have begun. A call that reads much says what, so that a
// thread without work may prefetch what the next one reads.
template <typename Work>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, const Work& work, const Reads& reads = {}) {
  int64_t helpers = pool.num_threads() - 1;
  if (helpers > count - 1) helpers = count - 1;
  if (helpers <= 0) {
    for (int64_t chunk = 0; chunk < count; ++chunk) work(chunk);
    return;
  }
  auto chunks = std::make_shared<Chunks>(count, helpers + 1);
  chunks->work = &work;
  chunks->run = [](const void* shared, int64_t chunk) { (*static_cast<const Work*>(shared))(chunk); };
  Helpers::Get().Post(chunks, helpers, reads);
  chunks->TakeAll(0);
  chunks->WaitUntilDone();
}

}  // namespace fewbit
