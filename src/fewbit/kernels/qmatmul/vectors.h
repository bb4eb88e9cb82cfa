// One row of x, or a few: codes become numbers in registers and are used there. Included inside a level's namespace.
//
// A lane of a block holds `kSteps` neighbouring codes, and step i decodes code i of every lane. Along contracted columns
// x is laid out alike beforehand (BlockedX), and the scale of a lane is one number as long as its codes lie in one tile.
// Along columns that are outputs, a lane's bytes are neighbouring outputs.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

constexpr int64_t kFewRows = 4;

static inline __m512i BytesAt(const uint8_t* p, int64_t left) {
  if (left >= 64) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi8(left <= 0 ? 0 : (1ull << left) - 1, p);
}

// Codes of 1, 2 and 4 bits: a shift brings one to the low bits of each lane, and the permutation looks at four of them only.
template <int kBits>
struct Narrow {
  static constexpr int kSteps = 32 / kBits, kLaneBytes = 4;
  __m512i raw;
  static V Table(const Weight& w) { return Load(w.values); }
  Narrow(const uint8_t* p, int64_t left) : raw(BytesAt(p, left)) {}
  V At(int i, V table) const { return _mm512_permutexvar_ps(_mm512_srli_epi32(raw, i * kBits), table); }
};

template <bool kIsSigned>
struct Byte {
  static constexpr int kSteps = 4, kLaneBytes = 4;
  __m512i raw;
  static V Table(const Weight&) { return Same(0.0f); }
  Byte(const uint8_t* p, int64_t left) : raw(BytesAt(p, left)) {}
  V At(int i, V) const {
    const __m512i high = i == 3 ? raw : _mm512_slli_epi32(raw, 24 - 8 * i);
    return _mm512_cvtepi32_ps(kIsSigned ? _mm512_srai_epi32(high, 24) : _mm512_srli_epi32(high, 24));
  }
};

// The scale or zero point of each lane, from those of a row's tiles. kPattern: a block holds whole tiles; kOne: it lies in one.
enum class Lanes { kOne, kPattern, kAny };

struct TileLanes {
  Lanes form;
  int64_t block, tile, last;  // codes of a block and of a tile; the last tile
  __m512i pattern;
  TileLanes(int64_t block, int64_t steps, int64_t tile, int64_t cols) : block(block), tile(tile), last((cols - 1) / tile) {
    form = tile >= cols || tile % block == 0 ? Lanes::kOne : block % tile == 0 ? Lanes::kPattern : Lanes::kAny;
    alignas(64) int32_t lane[16];
    for (int j = 0; j < 16; ++j) lane[j] = static_cast<int32_t>(j * steps / (form == Lanes::kPattern ? tile : 1));
    pattern = _mm512_load_si512(lane);
  }
};

template <Lanes kForm>
static inline V LanesOf(const TileLanes& t, const float* of_tiles, int64_t b) {
  if (kForm == Lanes::kOne) return Same(of_tiles[b * t.block / t.tile]);
  if (kForm == Lanes::kPattern) return _mm512_permutexvar_ps(t.pattern, Load(of_tiles + b * t.block / t.tile));
  float lane[16];
  for (int j = 0; j < 16; ++j) {
    const int64_t tile = (b * t.block + j * (t.block / 16)) / t.tile;
    lane[j] = of_tiles[tile < t.last ? tile : t.last];
  }
  return Load(lane);
}

template <class Decoder, Lanes kForm, Zero kRole, int kM>
static void DotRows(const Job& job, int64_t r0, int64_t r1) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps, kBytes = 16 * Decoder::kLaneBytes;
  const Weight& w = job.w;
  const int64_t blocks = (w.cols + kBlock - 1) / kBlock, tiles = w.tiles_per_row;
  const TileLanes lanes(kBlock, kSteps, w.col_tile, w.cols);
  const V table = Decoder::Table(w);
  float* scale = Workspace(2 * (tiles + 32));
  float* zero = scale + tiles + 32;
  for (int i = 0; i < 32; ++i) scale[tiles + i] = zero[tiles + i] = 0.0f;
  for (int64_t r = r0; r < r1; ++r) {
    const uint8_t* row = w.codes + r * w.row_stride;
    LoadHeld(w.scale, r / w.row_tile * tiles, tiles, w.unit, scale);
    if (kRole != Zero::kNone) LoadHeld(w.zero, r / w.row_tile * tiles, tiles, 1.0f, zero);
    V total[kM];
    for (int m = 0; m < kM; ++m) total[m] = Same(0.0f);
    for (int64_t b = 0; b < blocks; ++b) {
      const Decoder codes(row + b * kBytes, w.row_stride - b * kBytes);
      const V s = LanesOf<kForm>(lanes, scale, b);
      const V z = kRole == Zero::kNone ? Same(0.0f) : LanesOf<kForm>(lanes, zero, b);
      const float* x = job.x + b * kBlock;
      V sum[kM];
#pragma GCC unroll 32
      for (int i = 0; i < kSteps; ++i) {
        V v = codes.At(i, table);
        if (kRole == Zero::kWhole) v = Sub(v, z);
        for (int m = 0; m < kM; ++m) {
          const V a = Load(x + m * job.ldx + 16 * i);
          sum[m] = i == 0 ? Mul(v, a) : MulAdd(v, a, sum[m]);
        }
      }
      for (int m = 0; m < kM; ++m) {
        total[m] = MulAdd(sum[m], s, total[m]);
        if (kRole == Zero::kOffset) total[m] = MulAdd(z, Load(job.x_sums + m * job.ld_sums + b * 16), total[m]);
      }
    }
    for (int m = 0; m < kM; ++m) {
      const float y = SumOfLanes(total[m]);
      StoreOutputs(job, m, r, 1, &y);
    }
  }
}

// Columns are outputs: bytes of a row are neighbouring outputs, and the codes of a byte follow each other along the contraction.
template <class Decoder, Zero kRole, int kM>
static void SumColumns(const Job& job, int64_t n0, int64_t width) {
  constexpr int kSub = Decoder::kLaneBytes, kAlong = Decoder::kSteps / kSub, kBlock = 16 * kSub;
  const Weight& w = job.w;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width, blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t padded = blocks * kBlock, tile = w.row_tile < w.rows ? w.row_tile : 64 * kAlong;
  const V table = Decoder::Table(w);
  float* total = Workspace(padded * (kM + 4) + 4 * 16);
  float *plain = total + padded * kM, *scale = plain + padded, *zero = scale + padded;
  for (int64_t i = 0; i < padded * kM; ++i) total[i] = 0.0f;
  // From one number a tile of columns to one a column, those of a lane's k-th byte together.
  const auto load = [&](const Held& held, int64_t row, float unit, float* out) {
    const int64_t first = n0 / w.col_tile, count = (n0 + outputs - 1) / w.col_tile - first + 1;
    LoadHeld(held, row * w.tiles_per_row + first, count, unit, plain);
    for (int64_t b = 0; b < blocks; ++b) {
      for (int k = 0; k < kSub; ++k) {
        for (int j = 0; j < 16; ++j) {
          const int64_t n = b * kBlock + j * kSub + k;
          out[b * kBlock + k * 16 + j] = n < outputs ? plain[(n0 + n) / w.col_tile - first] : 0.0f;
        }
      }
    }
  };
  int64_t loaded = -1;
  for (int64_t k0 = 0; k0 < w.rows; k0 += tile) {
    const int64_t k1 = k0 + tile < w.rows ? k0 + tile : w.rows, first = k0 / kAlong, last = (k1 + kAlong - 1) / kAlong;
    if (loaded != k0 / w.row_tile) {
      loaded = k0 / w.row_tile;
      load(w.scale, loaded, w.unit, scale);
      if (kRole != Zero::kNone) load(w.zero, loaded, 1.0f, zero);
    }
    float x_sum[kM];
    for (int m = 0; m < kM; ++m) {
      x_sum[m] = 0.0f;
      for (int64_t k = k0; kRole == Zero::kOffset && k < k1; ++k) x_sum[m] += job.x[m * job.ldx + k];
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* p = w.codes + n0 + b * kBlock;
      const int64_t left = w.cols - n0 - b * kBlock;
      V sum[kM][kSub], z[kSub];
      for (int k = 0; k < kSub; ++k) {
        z[k] = Load(zero + b * kBlock + k * 16);
        for (int m = 0; m < kM; ++m) sum[m][k] = Same(0.0f);
      }
      const int64_t ahead = (last - first) * w.row_stride;
      for (int64_t r = first; r < last; ++r) {
        const Decoder codes(p + r * w.row_stride, left);
        _mm_prefetch(reinterpret_cast<const char*>(p + r * w.row_stride + ahead), _MM_HINT_T0);
        const float* x = job.x + r * kAlong;
#pragma GCC unroll 32
        for (int i = 0; i < Decoder::kSteps; ++i) {
          V v = codes.At(i, table);
          if (kRole == Zero::kWhole) v = Sub(v, z[i / kAlong]);
          for (int m = 0; m < kM; ++m) {
            sum[m][i / kAlong] = MulAdd(v, Same(x[m * job.ldx + i % kAlong]), sum[m][i / kAlong]);
          }
        }
      }
      for (int m = 0; m < kM; ++m) {
        for (int k = 0; k < kSub; ++k) {
          float* t = total + m * padded + b * kBlock + k * 16;
          V sum_here = MulAdd(sum[m][k], Load(scale + b * kBlock + k * 16), Load(t));
          if (kRole == Zero::kOffset) sum_here = MulAdd(z[k], Same(x_sum[m]), sum_here);
          Store(t, sum_here);
        }
      }
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int64_t n = 0; n < padded; ++n) plain[n] = total[m * padded + n / kBlock * kBlock + n % kSub * 16 + n % kBlock / kSub];
    StoreOutputs(job, m, n0, outputs, plain);
  }
}

template <class Decoder, Zero kRole, int kM>
static void Few(const Job& job, bool dots, int64_t begin, int64_t count) {
  if (!dots) return SumColumns<Decoder, kRole, kM>(job, begin, count);
  const int64_t end = begin + count < job.w.rows ? begin + count : job.w.rows;
  const Lanes form = TileLanes(16 * Decoder::kSteps, Decoder::kSteps, job.w.col_tile, job.w.cols).form;
  if (form == Lanes::kOne) DotRows<Decoder, Lanes::kOne, kRole, kM>(job, begin, end);
  else if (form == Lanes::kPattern) DotRows<Decoder, Lanes::kPattern, kRole, kM>(job, begin, end);
  else DotRows<Decoder, Lanes::kAny, kRole, kM>(job, begin, end);
}

typedef void (*FewRows)(const Job&, bool, int64_t, int64_t);

template <class Decoder, Zero kRole>
static FewRows OfRows(int64_t m) {
  static const FewRows by_rows[] = {Few<Decoder, kRole, 1>, Few<Decoder, kRole, 2>, Few<Decoder, kRole, 3>, Few<Decoder, kRole, 4>};
  return by_rows[m - 1];
}

template <class Decoder>
static FewRows OfRole(const Job& job) {
  if (job.w.role == Zero::kWhole) return OfRows<Decoder, Zero::kWhole>(job.M);
  if (job.w.role == Zero::kOffset) return OfRows<Decoder, Zero::kOffset>(job.M);
  return OfRows<Decoder, Zero::kNone>(job.M);
}

// The kernel for a few rows of x, and the codes that a lane holds; null where panels serve.
static FewRows FewRowsOf(const Job& job, int64_t* steps) {
  const Weight& w = job.w;
  const bool bytes = w.bits == 8 && w.kind != Codes::kTable;
  if (job.M > kFewRows || (!bytes && w.bits != 1 && w.bits != 2 && w.bits != 4)) return nullptr;
  if (w.bits < 8 && w.packed_cols != job.contracts_cols) return nullptr;
  *steps = bytes ? 4 : 32 / w.bits;
  if (job.contracts_cols && w.col_tile < w.cols && w.col_tile % *steps != 0) return nullptr;
  if (!job.contracts_cols && w.row_tile < w.rows && w.row_tile * w.bits % 8 != 0) return nullptr;
  if (bytes) return w.kind == Codes::kSigned ? OfRole<Byte<true>>(job) : OfRole<Byte<false>>(job);
  return w.bits == 4 ? OfRole<Narrow<4>>(job) : w.bits == 2 ? OfRole<Narrow<2>>(job) : OfRole<Narrow<1>>(job);
}

#else

typedef void (*FewRows)(const Job&, bool, int64_t, int64_t);
static FewRows FewRowsOf(const Job&, int64_t*) { return nullptr; }

#endif

// How many codes a lane holds where x must be laid out alike; 1 where x stays in order.
static int64_t StepsOf(const Job& job) {
  int64_t steps = 1;
  return FewRowsOf(job, &steps) != nullptr && job.contracts_cols ? steps : 1;
}

constexpr int64_t kTall = 384;          // rows of x that share one decoding of the weight
constexpr int64_t kFewOutputs = 16;     // rows of the weight in a chunk of a few dot products
constexpr int64_t kFewColumns = 512;    // its columns in a chunk of a few sums

static int64_t WidthOf(const Job& job, bool few) {
  return !few ? PanelOutputs(job) : job.contracts_cols ? kFewOutputs : kFewColumns;
}

static int64_t ChunksOf(const Job& job) {
  int64_t steps;
  const int64_t width = WidthOf(job, FewRowsOf(job, &steps) != nullptr);
  return (job.outputs() + width - 1) / width * ((job.M + kTall - 1) / kTall);
}

static void RunChunk(const Job& job, int64_t chunk) {
  int64_t steps;
  const FewRows few = FewRowsOf(job, &steps);
  const int64_t width = WidthOf(job, few != nullptr);
  if (few != nullptr) return few(job, job.contracts_cols, chunk * width, width);
  const int64_t down = (job.M + kTall - 1) / kTall, m0 = chunk % down * kTall;
  PanelProduct(job, chunk / down * width, m0, m0 + kTall < job.M ? m0 + kTall : job.M);
}
