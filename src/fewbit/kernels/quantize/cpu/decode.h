// From codes back to floats. Included in the namespace of an instruction set.

INLINE void UnpackRun(const uint8_t* in, int64_t count, int bits, uint8_t* out) {
  if (bits == 4) {
    int64_t i = 0;
    for (; i < count / 2; ++i) out[2 * i] = in[i] & 15, out[2 * i + 1] = in[i] >> 4;
    if (count & 1) out[count - 1] = in[i] & 15;
    return;
  }
  const uint64_t mask = (1u << bits) - 1;
  for (int64_t i = 0; i < count; i += 8) {
    const int64_t some = count - i < 8 ? count - i : 8;
    uint64_t word = 0;
    for (int64_t k = 0; k < (some * bits + 7) / 8; ++k) word |= (uint64_t)in[i / 8 * bits + k] << (8 * k);
    for (int64_t k = 0; k < some; ++k) out[i + k] = (uint8_t)((word >> (k * bits)) & mask);
  }
}

// The codes of row `r` of an array packed across rows; `in` is the first of the packed rows.
INLINE void UnpackRow(const uint8_t* in, int64_t stride, int64_t r, int64_t count, int bits, uint8_t* out) {
  const int64_t byte = r * bits / 8;
  const int shift = (int)(r * bits - byte * 8);
  const uint8_t mask = (uint8_t)((1 << bits) - 1);
  const uint8_t* low = in + byte * stride;
  if (shift + bits <= 8) {
    for (int64_t i = 0; i < count; ++i) out[i] = (uint8_t)(low[i] >> shift) & mask;
  } else {
    const uint8_t* high = low + stride;
    for (int64_t i = 0; i < count; ++i) out[i] = (uint8_t)((low[i] >> shift) | (high[i] << (8 - shift))) & mask;
  }
}

// What a scale and its companions make of kLanes decoded numbers.
struct Restored {
  V factor, more, zero, offset;
  bool has_more, has_zero, has_offset;
  INLINE_MEMBER V operator()(V v) const {
    if (has_zero) v -= zero;
    v *= factor;
    if (has_more) v *= more;
    if (has_offset) v = ((v < -3.40282347e38f) ? Same(-3.40282347e38f) : v) + offset;
    return v;
  }
};

// The numbers of kLanes codes (of the first `some`): whole ones by conversion, those of up to 4 bits by one permute of a register
// where there is one that wide, others from the table.
INLINE V NumbersOf(const Decoding& d, const uint8_t* codes, int64_t some) {
  B bytes;
  if (some >= kLanes) {
    __builtin_memcpy(&bytes, codes, sizeof bytes);
  } else {
    for (int i = 0; i < kLanes; ++i) bytes[i] = codes[i < some ? i : 0];
  }
  const I index = ToInts(bytes);
  if (d.whole_shift >= 0) {
    return __builtin_convertvector((index << d.whole_shift) >> d.whole_shift, V) * Same(d.values[1]);
  }
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512
  if (d.bits <= 4) return (V)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(d.values));
  return (V)_mm512_i32gather_ps((__m512i)index, d.values, 4);
#elif FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  return (V)_mm256_i32gather_ps(d.values, (__m256i)index, 4);
#else
  V v;
  for (int i = 0; i < kLanes; ++i) v[i] = d.values[bytes[i]];
  return v;
#endif
}

INLINE void DecodeRow(const Decoding& d, const uint8_t* codes, int64_t tiles_at, const Elements& out) {
  const float* more = d.more_factors == nullptr ? d.factors : d.more_factors;
  const float* zeros = d.zeros == nullptr ? d.factors : d.zeros;
  const float* offsets = d.offsets == nullptr ? d.factors : d.offsets;
  const bool has_more = d.more_factors != nullptr, has_zero = d.zeros != nullptr, has_offset = d.offsets != nullptr;
  if (d.tile_columns == 1) {
    for (int64_t c = 0; c < d.columns; c += kLanes) {
      const int64_t some = d.columns - c, at = tiles_at + c;
      const Restored restore{LoadSome(d.factors + at, some), LoadSome(more + at, some), LoadSome(zeros + at, some),
                             LoadSome(offsets + at, some), has_more, has_zero, has_offset};
      StoreSome(out.From(c), restore(NumbersOf(d, codes + c, some)), some);
    }
    return;
  }
  for (int64_t tile = 0, c = 0; c < d.columns; ++tile) {
    const int64_t at = tiles_at + tile;
    const int64_t end = c + d.tile_columns < d.columns ? c + d.tile_columns : d.columns;
    const Restored restore{Same(d.factors[at]), Same(more[at]), Same(zeros[at]), Same(offsets[at]), has_more, has_zero, has_offset};
    for (; c < end; c += kLanes) StoreSome(out.From(c), restore(NumbersOf(d, codes + c, end - c)), end - c);
    c = end;
  }
}

static void DecodeRows(const Decoding& d, int64_t b, int64_t r0, int64_t r1, uint8_t* scratch) {
  for (int64_t r = r0; r < r1; ++r) {
    const uint8_t* codes = d.codes + b * d.packed_rows * d.packed_columns;
    const uint8_t* row = scratch;
    if (d.bits == 8) row = codes + r * d.packed_columns;
    else if (d.packs_rows) UnpackRow(codes, d.packed_columns, r, d.columns, d.bits, scratch);
    else UnpackRun(codes + r * d.packed_columns, d.columns, d.bits, scratch);
    const int64_t tiles_at = (b * d.row_tiles + r / d.tile_rows) * d.column_tiles - d.first_tile;
    DecodeRow(d, row, tiles_at, Elements{(char*)d.out, d.element}.From((b * d.rows + r) * d.columns));
  }
}
