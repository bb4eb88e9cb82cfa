// The product by panels: weights decoded into float32 that stays in cache, and multiplied by blocks of registers. For any
// scheme and any number of rows of x. Included in the namespace of an instruction set.
//
// A panel is [k][n] whichever axis of the weight is contracted, so one micro-kernel multiplies all: vectors of outputs times
// one number of x, broadcast. A block of registers walks down the rows of x while its part of the panel, 128 by 64 numbers,
// stays in the first-level cache.

constexpr int64_t kPart = 128;                            // contracted elements of one call of the micro-kernel
constexpr int64_t kPanelOutputs = 128, kSmallPanel = 64;  // outputs of a panel; of a weight that has few
constexpr int64_t kSlack = 64;

static int64_t PanelOutputs(const Job& job) { return job.outputs() < 8 * kPanelOutputs ? kSmallPanel : kPanelOutputs; }

// How a panel of the weight is decoded: outputs from n0 on, contracted places from k0 on; `rest` is memory for scales.
typedef void (*Fill)(const Weight&, int64_t n0, int64_t outputs, int64_t k0, int64_t count, float* rest, float* panel, int64_t ldw);

// The same in any scheme, row by row of the weight. Rows of outputs are turned, kLanes of them at a time.
static void FillRows(const Weight& w, bool dots, int64_t n0, int64_t outputs, int64_t k0, int64_t count, float* rest,
                     float* panel, int64_t ldw) {
  const int64_t longest = (dots ? kPart : kPanelOutputs) + kSlack;
  RowScratch scratch{reinterpret_cast<uint8_t*>(rest), rest + longest, rest + 2 * longest, rest + 3 * longest, -1};
  if (!dots) {
    for (int64_t k = 0; k < count; ++k) DecodeRow(w, k0 + k, n0, outputs, scratch, panel + k * ldw);
    return;
  }
  float* rows = rest + 4 * longest;
  for (int64_t n = 0; n < outputs; n += kLanes) {
    for (int64_t i = 0; i < kLanes && n + i < outputs; ++i) DecodeRow(w, n0 + n + i, k0, count, scratch, rows + i * longest);
    for (int64_t k = 0; k < count; k += kLanes) Transpose(rows + k, longest, panel + k * ldw + n, ldw);
  }
}

// Asks for the bytes of rows [r0, r1) and columns [c0, c1): those of the next panel, while this one is multiplied. They are
// short pieces on many pages, which the processor does not foresee.
static void AskFor(const Weight& w, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
  const int64_t row_bits = w.packed_cols ? 8 : w.bits, col_bits = w.packed_cols ? w.bits : 8;
  for (int64_t r = r0 * row_bits / 8; r < r1 * row_bits / 8; ++r) {
    for (int64_t c = c0 * col_bits / 8; c < c1 * col_bits / 8; c += 64) __builtin_prefetch(w.codes + r * w.row_stride + c, 0, 2);
  }
}

// Floats of a panel, and of the memory that filling and storing it takes.
static int64_t PanelRoom(int64_t length, int64_t width) {
  return (width + kLanes) * length + kSlack + (4 + kLanes) * (kPart + kSlack) + 32 * (length + kSlack);
}

// Fills a panel from place k0 on, row by row without `fill`; returns how many places it has.
static int64_t FillPanel(const Job& job, Fill fill, int64_t n0, int64_t outputs, int64_t k0, int64_t length, float* rest, float* panel,
                         int64_t ldw) {
  const int64_t count = job.contracted() - k0 < length ? job.contracted() - k0 : length;
  if (fill != nullptr) fill(job.w, n0, outputs, k0, count, rest, panel, ldw);
  else FillRows(job.w, job.contracts_cols, n0, outputs, k0, count, rest, panel, ldw);
  const int64_t next = k0 + count, after = next + length < job.contracted() ? next + length : job.contracted();
  if (job.contracts_cols) AskFor(job.w, n0, n0 + outputs, next, after);
  else AskFor(job.w, next, after, n0, n0 + outputs);
  return count;
}

// Where a panel has an output.
static int64_t PlaceInPanel(int64_t n, int64_t interleave) {
  return n / (16 * interleave) * 16 * interleave + n % interleave * 16 + n % (16 * interleave) / interleave;
}

// Stores rows [m0, m1) of the outputs of a panel; `rest` has room for one.
static void StorePanel(const Job& job, const float* c, int64_t width, int64_t interleave, int64_t n0, int64_t outputs, int64_t m0,
                       int64_t m1, float* rest) {
  int32_t place[kPanelOutputs];
  for (int64_t n = 0; n < width; ++n) {
    place[n] = static_cast<int32_t>(PlaceInPanel(n, interleave));
  }
  for (int64_t m = m0; m < m1; ++m, c += width) {
    for (int64_t n = 0; interleave > 1 && n < width; ++n) rest[n] = c[place[n]];
    StoreOutputs(job, m, n0, outputs, interleave > 1 ? rest : c);
  }
}

// Rows [m0, m1) of y for the outputs of one panel's width, from n0 on.
//
// With `fill` the panel is filled `length` places at a time, and outputs are interleaved by `interleave`.
static void PanelProduct(const Job& job, Fill fill, int64_t length, int64_t width, int64_t interleave, int64_t n0, int64_t m0,
                         int64_t m1) {
  const int64_t rows = m1 - m0, ldw = width + kLanes;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width;
  const int64_t across = (outputs + 16 * interleave - 1) / (16 * interleave) * 16 * interleave;  // the end of their padded range
  float* floats = Workspace(PanelRoom(length, width) + rows * width);
  float *panel = floats, *c = panel + ldw * length + kSlack, *rest = c + rows * width;
  for (int64_t i = 0; i < rows * width; ++i) c[i] = 0.0f;
  for (int64_t k0 = 0; k0 < job.contracted(); k0 += length) {
    const int64_t count = FillPanel(job, fill, n0, outputs, k0, length, rest, panel, ldw);
    for (int64_t n = 0; n < across; n += kAcross * kLanes) {
      for (int64_t k = 0; k < count; k += kPart) {
        const int64_t part = count - k < kPart ? count - k : kPart;
        for (int64_t m = 0; m < rows; m += kRows) {
          const float* x = job.x + (m0 + m) * job.ldx + k0 + k;
          BlockOf(rows - m)(x, job.ldx, panel + k * ldw + n, ldw, part, c + m * width + n, width);
        }
      }
    }
  }
  StorePanel(job, c, width, interleave, n0, outputs, m0, m1, rest);
}
