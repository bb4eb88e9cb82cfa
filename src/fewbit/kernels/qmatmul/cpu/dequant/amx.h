// The product of x in bfloat16 by panels with AMX, whose instruction multiplies pairs of bfloat16 and sums in float32: 16 rows of x, 32
// places and 16 outputs at a time. Included in the namespace of its instruction set, which has all else from that of AVX-512.
//
// A decoded weight, a float32, is the sum of three bfloat16: the number rounded, what that leaves rounded, and the rest. So all
// products with x are exact, and sums are in float32, as at the other levels. Parts that are zero in a whole panel are not multiplied:
// MXFP4 and NVFP4 are one part, 4 bits with scales in bfloat16 or float16 two. What all weights of an output have in common multiplies
// its sums: NVFP4's tensor scale, and scales that do not change along the contraction, which leave codes of one part. Numbers below
// 2**-126 count as zero.
//
// Registers 0 to 3 are sums of 32 rows and 32 outputs, 4 and 5 have x, 6 and 7 parts of w.

constexpr int64_t kTileWide = 16;  // outputs of a register; one of w has as many numbers as one of x, kTile
constexpr int64_t kMostParts = 3;
constexpr int64_t kFewestRows = 64;  // of x, for which a panel is worth cutting into parts

// The upper half of the bits of float32, rounded, and in `x` the rest: none of a number that is not finite.
INLINE U TakePart(V& x) {
  constexpr int kNaN = 0x81, kSpecial = 0x99;
  const U bits = (U)x, kept = (U)Same(static_cast<int32_t>(0xFFFF0000));
  U part = (bits + 0x7FFF + ((bits >> 16) & 1)) & kept;
  const __mmask16 is_special = _mm512_fpclass_ps_mask(x, kSpecial), is_over = _mm512_fpclass_ps_mask((V)part, kSpecial);
  part = (U)_mm512_mask_and_epi32((__m512i)part, is_over, (__m512i)bits, (__m512i)kept);  // numbers next to infinity are cut off
  part = (U)_mm512_mask_or_epi32((__m512i)part, _mm512_fpclass_ps_mask(x, kNaN), (__m512i)part, _mm512_set1_epi32(0x00400000));
  x = _mm512_maskz_sub_ps(static_cast<__mmask16>(~is_special), x, (V)part);
  return part;
}

// The next part of two rows of a panel, number by number side by side, and what it leaves of them.
INLINE U TakePair(V& first, V& second) {
  constexpr int kSpecial = 0x99;
  const __m512i side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18,
                                        2, 17, 1, 16, 0);
  const U words = (U)_mm512_permutexvar_epi16(side, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  const V a = Sub(first, (V)(words << 16)), b = Sub(second, (V)(words & 0xFFFF0000));
  if ((_mm512_fpclass_ps_mask(a, kSpecial) | _mm512_fpclass_ps_mask(b, kSpecial)) != 0) {  // a number is not finite, or next to it
    const U low = TakePart(first) >> 16;
    return low | TakePart(second);
  }
  first = a, second = b;
  return words;
}

// Cuts a panel [count, ldw] into parts: [columns of 16 outputs, steps, kMostParts, 16 pairs of places, 16 outputs]. Returns how many
// parts have a number other than zero, at least 1.
static int64_t CutPanel(const float* panel, int64_t ldw, int64_t count, int64_t outputs, uint16_t* out) {
  U is_there[kMostParts] = {};
  const V zeros = Same(0.0f);
  for (int64_t n = 0; n < outputs; n += kTileWide) {
    for (int64_t k = 0; k < count; k += kTileDeep, out += kMostParts * kTile) {
      uint16_t* to = out;
      for (int64_t i = k; i < k + kTileDeep; i += 2, to += 2 * kTileWide) {
        V first = i < count ? Load(panel + i * ldw + n) : zeros, second = i + 1 < count ? Load(panel + (i + 1) * ldw + n) : zeros;
        UNROLL for (int64_t p = 0; p < kMostParts; ++p) {
          const bool is_done = p != 0 && !IsAny(((I)first | (I)second) != 0);
          const U words = is_done ? U{} : TakePair(first, second);
          is_there[p] |= words & 0x7FFF7FFF;
          __builtin_memcpy(to + p * kTile, &words, sizeof(words));
        }
      }
    }
  }
  return IsAny((I)is_there[2] != 0) ? 3 : IsAny((I)is_there[1] != 0) ? 2 : 1;
}

#define MULTIPLY_PART(part)                    \
  _tile_loadd(6, w + (part) * kTile, 64);      \
  _tile_loadd(7, next_w + (part) * kTile, 64); \
  _tile_dpbf16ps(0, 4, 6);                     \
  _tile_dpbf16ps(1, 4, 7);                     \
  _tile_dpbf16ps(2, 5, 6);                     \
  _tile_dpbf16ps(3, 5, 7);

// Adds the products of `steps` steps of 32 rows of x and 32 outputs to the sums in memory. `next_x`: the second 16 rows.
template <int kParts>
static void MultiplyTiles(const uint16_t* x, const uint16_t* next_x, const uint16_t* w, int64_t steps, float* sums, int64_t width) {
  const uint16_t* next_w = w + steps * kMostParts * kTile;  // of the second 16 outputs
  float* next_sums = sums + kTileRows * width;
  _tile_loadd(0, sums, 4 * width);
  _tile_loadd(1, sums + kTileWide, 4 * width);
  _tile_loadd(2, next_sums, 4 * width);
  _tile_loadd(3, next_sums + kTileWide, 4 * width);
  for (int64_t i = 0; i < steps; ++i) {
    _tile_loadd(4, x, 64);
    _tile_loadd(5, next_x, 64);
    MULTIPLY_PART(0)
    if constexpr (kParts > 1) {
      MULTIPLY_PART(1)
    }
    if constexpr (kParts > 2) {
      MULTIPLY_PART(2)
    }
    x += kTile, next_x += kTile, w += kMostParts * kTile, next_w += kMostParts * kTile;
  }
  _tile_stored(0, sums, 4 * width);
  _tile_stored(1, sums + kTileWide, 4 * width);
  _tile_stored(2, next_sums, 4 * width);
  _tile_stored(3, next_sums + kTileWide, 4 * width);
}
#undef MULTIPLY_PART

// Takes a factor of all weights out that would make them longer than a bfloat16: a tensor scale of scales in 8 bits.
static float TakeUnit(Weight& w) {
  int exponent;
  const float unit = w.unit;
  if (w.scale.type != ScaleType::kTable || w.role == Zero::kOffset || std::frexp(unit, &exponent) == 0.5f) return 1.0f;
  w.unit = 1.0f;
  return unit;
}

// Takes the scales of outputs out, if each has one; fills `factors` by their places in a panel. Infinite and NaN ones stay, which make
// NaN of weights that are zero.
static bool TakeScales(Job& job, int64_t n0, int64_t outputs, int64_t width, int64_t interleave, float factor, float* factors) {
  static const float kOne = 1.0f;
  Weight& w = job.w;
  const int64_t along = job.contracts_cols ? w.col_tile : w.row_tile, tile = job.contracts_cols ? w.row_tile : w.col_tile;
  if (along < job.contracted() || w.role != Zero::kNone || job.order != nullptr) return false;
  bool is_finite = true;
  float scale = 1.0f;
  for (int64_t n = 0; n < width; ++n) {
    const int64_t at = (n0 + n) / tile;
    if (n < outputs && (n == 0 || (n0 + n) % tile == 0)) {
      LoadScales(w.scale, job.contracts_cols ? at * w.tiles_per_row : at, 1, factor * w.unit, &scale);
    }
    is_finite &= std::isfinite(scale);
    factors[PlaceInPanel(n, interleave)] = scale;
  }
  if (is_finite) w.scale = {ScaleType::kF32, &kOne, nullptr}, w.unit = 1.0f, w.row_tile = w.rows, w.col_tile = w.cols, w.tiles_per_row = 1;
  return is_finite;
}

// Rows [m0, m1) of y for the outputs of one panel's width, from n0 on; see `PanelProduct`.
static void TileProduct(const Job& asked, Fill fill, int64_t length, int64_t width, int64_t interleave, int64_t n0, int64_t m0, int64_t m1) {
  typedef void (*Multiply)(const uint16_t*, const uint16_t*, const uint16_t*, int64_t, float*, int64_t);
  static const Multiply by_parts[] = {MultiplyTiles<1>, MultiplyTiles<2>, MultiplyTiles<3>};
  Job job = asked;
  const float factor = TakeUnit(job.w);
  float factors[kPanelOutputs];
  const int64_t rows = (m1 - m0 + 2 * kTileRows - 1) / (2 * kTileRows) * 2 * kTileRows, ldw = width + kLanes;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width, unit = 16 * (interleave < 2 ? 2 : interleave);
  const int64_t across = (outputs + unit - 1) / unit * unit, block = job.tile_steps() * kTile;
  float* sums = Workspace(rows * width + width * length * kMostParts / 2 + PanelRoom(length, width));
  float *parts_memory = sums + rows * width, *panel = parts_memory + width * length * kMostParts / 2, *rest = panel + ldw * length + kSlack;
  uint16_t* parts = reinterpret_cast<uint16_t*>(parts_memory);
  for (int64_t i = 0; i < rows * width; ++i) sums[i] = 0.0f;
  const bool has_factors = TakeScales(job, n0, outputs, width, interleave, factor, factors);
  for (int64_t n = 0; !has_factors && n < width; ++n) factors[n] = factor;
  TileRegisters registers;
  for (int i = 0; i < 8; ++i) registers.Shape(i, kTileRows, 64);
  registers.Load();
  for (int64_t k0 = 0; k0 < job.contracted(); k0 += length) {
    const int64_t count = FillPanel(job, fill, n0, outputs, k0, length, rest, panel, ldw), steps = (count + kTileDeep - 1) / kTileDeep;
    const Multiply multiply = by_parts[CutPanel(panel, ldw, count, across, parts) - 1];
    asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler what they read
    for (int64_t n = 0; n < across; n += 2 * kTileWide) {
      for (int64_t m = 0; m < rows; m += 2 * kTileRows) {
        const uint16_t* x = job.x_tiles + (m0 + m) / kTileRows * block + k0 / kTileDeep * kTile;
        multiply(x, x + block, parts + n * steps * kMostParts * kTileDeep, steps, sums + m * width + n, width);
      }
    }
  }
  _tile_release();  // the system needs longer to switch from a thread that holds these registers
  for (int64_t m = 0; (has_factors || factor != 1.0f) && m < m1 - m0; ++m) {
    for (int64_t n = 0; n < width; ++n) sums[m * width + n] *= factors[n];
  }
  StorePanel(job, sums, width, interleave, n0, outputs, m0, m1, rest);
}

static bool TakesBfloat16(const Job& job) { return job.M >= kFewestRows && avx512::ChoiceOf(job).few == nullptr; }

static void RunChunk(const Job& job, int64_t chunk) {
  if (job.x_tiles == nullptr) return avx512::RunChunk(job, chunk);
  const avx512::Choice choice = avx512::ChoiceOf(job);
  const int64_t least = choice.fill == nullptr ? kPart : 2 * kPart;  // fewer loads and stores of sums
  avx512::RunPanels(job, choice, chunk, least, TileProduct);
}

Kernels GetKernels() { return {avx512::StepsOf, avx512::ChunksOf, RunChunk, TakesBfloat16}; }
