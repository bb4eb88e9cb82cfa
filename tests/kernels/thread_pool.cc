// What threads learn of the order of a program's reads, and how much they prefetch. Returns how many checks failed.
#include <cstdio>

#include "cpp/thread_pool.h"

using namespace fewbit;

static int wrong = 0;
static void Check(bool is_so, const char* what) {
  if (is_so) return;
  std::printf("not so: %s\n", what);
  ++wrong;
}

static char memory[4][1 << 20];

static Reads Of(int i) { return Reads{{memory[i], sizeof(memory[i])}, {}, {}}; }

static bool Foresees(Sequence& sequence, int now, int next) { return sequence.After(Of(now)).codes.data == memory[next]; }
static bool ForeseesNothing(Sequence& sequence, int now) { return sequence.After(Of(now)).codes.data == nullptr; }

static void LearnsALoop() {
  Sequence sequence;
  for (int i = 0; i < 6; ++i) Check(ForeseesNothing(sequence, i % 3), "two rounds of a loop prove nothing yet");
  for (int i = 6; i < 20; ++i) Check(Foresees(sequence, i % 3, (i + 1) % 3), "a loop that went round twice is foreseen");
}

static void ForgetsWhatChanged() {
  Sequence sequence;
  for (int i = 0; i < 9; ++i) sequence.After(Of(i % 3));
  Check(Foresees(sequence, 0, 1), "0 is followed by 1");
  sequence.After(Of(3));
  sequence.After(Of(1));
  Check(Foresees(sequence, 2, 0), "what did not change is still foreseen");
  Check(ForeseesNothing(sequence, 0), "0 was followed by 3 the last time");
}

// Steps of a KiB until one is enough.
static int64_t Steps(int64_t bytes, int64_t shares, int64_t enough) {
  int64_t steps = 0;
  FetchAhead(Reads{{memory[0], bytes}, {}, {}}, shares - 1, shares, [&] { return ++steps > enough; });
  return steps > enough ? enough : steps;
}

static void PrefetchesItsShare() {
  Check(Steps(64 << 10, 2, 1000) == 32, "a half of 64 KiB");
  Check(Steps(1 << 20, 1, 1000) == 512, "at most 512 KiB");
  Check(Steps(1 << 20, 1, 10) == 10, "until it is enough");
  Check(Steps(0, 2, 1000) == 0, "nothing of nothing");
}

int main() {
  LearnsALoop();
  ForgetsWhatChanged();
  PrefetchesItsShare();
  return wrong;
}
