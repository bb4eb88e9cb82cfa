// Products where a scale belongs to places of the contraction rather than to outputs, or where the outputs' codes share bytes:
// x @ w with a scale for each row of w, and every gradient. Included in the namespace of an instruction set.
//
// Such a scale cannot wait until its tile's sum is made, for its tile is as short as one place. It multiplies x instead, once for
// all outputs of the tile: y[n] = sum over k of (x[k] s[k]) c[k][n]. That is one multiplication for the 4 or 8 vectors of a
// lane's codes where rows are contracted, and a pass over x for each row of tiles where columns are. In panels, which are scaled
// as they are filled, such scales are few to load.

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

// 128 codes of 1, 2 or 4 bits: a lane holds eight of them, whatever their width.
template <int kBits>
struct Eights {
  static constexpr int kSteps = 8, kBytes = 16 * kBits;
  typedef V Table;
  __m512i raw;
  static Table TableOf(const Weight& w) { return Load(w.values); }
  Eights(const uint8_t* p, int64_t left, Table) {
    const __m512i bytes = BytesAt(p, left < kBytes ? left : kBytes);
    if (kBits == 1) raw = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(bytes));
    else if (kBits == 2) raw = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bytes));
    else raw = bytes;
  }
  V At(int i, Table table) const { return _mm512_permutexvar_ps(_mm512_srli_epi32(raw, i * kBits), table); }
};

// The scales or zero points of up to kDeep rows, of `tiles` tiles of columns from `first` on, as float32.
constexpr int64_t kDeep = 32;

struct ScalesOfRows {
  const float* at[kDeep];

  ScalesOfRows(const Weight& w, const StoredScales& stored, float unit, int64_t r0, int64_t rows, int64_t first, int64_t tiles, float* out) {
    const int64_t row = r0 / w.row_tile, count = (r0 + rows - 1) / w.row_tile - row + 1;
    if (tiles == w.tiles_per_row) {
      LoadScales(stored, row * tiles, count * tiles, unit, out);
    } else {
      for (int64_t i = 0; i < count; ++i) LoadScales(stored, (row + i) * w.tiles_per_row + first, tiles, unit, out + i * tiles);
    }
    int64_t left = (row + 1) * w.row_tile - r0;
    for (int64_t i = 0; i < rows; ++i, --left) {
      if (left == 0) out += tiles, left = w.row_tile;
      at[i] = out;
    }
  }
};

// Where blocks of columns find the scales of their lanes among those of a row, of which the first is that of tile `first`.
struct ColumnLanes {
  int64_t tile, cols, block, first;
  bool differ;  // whether blocks do: where one is neither whole tiles nor part of one
  W16 lanes;
  ColumnLanes(const Weight& w, int64_t block, int64_t first)
      : tile(w.col_tile), cols(w.cols), block(block), first(first), differ(tile < cols && tile % block != 0 && block % tile != 0) {
    lanes = Lanes(0);
  }
  W16 Lanes(int64_t b) const {
    alignas(64) int32_t lane[16];
    TilesOfLanes(tile, cols, b * block, block / 16, lane);
    return Words16(lane);
  }
};

struct BlockTiles {
  int64_t place;
  W16 lanes;
  BlockTiles(const ColumnLanes& t, int64_t b) : place(b * t.block / t.tile - t.first), lanes(t.differ ? t.Lanes(b) : t.lanes) {}
  V Of(const float* of_tiles) const { return Permuted(lanes, Load(of_tiles + place)); }
};

// Rows are contracted, and lanes hold neighbouring outputs: rows m0 and on of y, for outputs from n0 on.
template <class Decoder, bool kSubtracts, int kM>
static void SumRows(const Job& job, int m0, int64_t n0, int64_t width) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps;
  const Weight& w = job.w;
  const bool has_zero = w.role != Zero::kNone, has_offset = w.role == Zero::kOffset;
  const int64_t outputs = job.outputs() - n0 < width ? job.outputs() - n0 : width, blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t padded = blocks * kBlock, first = n0 / w.col_tile, tiles = (n0 + outputs - 1) / w.col_tile - first + 1;
  const ColumnLanes lanes(w, kBlock, first);
  const auto table = Decoder::TableOf(w);
  const float* x = job.x + m0 * job.ldx;
  float* total = Workspace(padded * (kM + 1) + 2 * (kDeep * tiles + 16));
  float *plain = total + padded * kM, *scales = plain + padded, *zeros = scales + kDeep * tiles + 16;
  for (int64_t i = 0; i < padded * kM; ++i) total[i] = 0.0f;
  for (int64_t k0 = 0; k0 < w.rows; k0 += kDeep) {
    const int64_t deep = k0 + kDeep < w.rows ? kDeep : w.rows - k0;
    const ScalesOfRows scale(w, w.scale, w.unit, k0, deep, first, tiles, scales);
    const ScalesOfRows zero = !has_zero ? scale : ScalesOfRows(w, w.zero, 1.0f, k0, deep, first, tiles, zeros);
    for (int64_t b = 0; b < blocks; ++b) {
      V sum[kM][kSteps], offset[kM];
#pragma GCC unroll 2
      for (int m = 0; m < kM; ++m) {
        offset[m] = Same(0.0f);
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; ++i) sum[m][i] = Load(total + m * padded + b * kBlock + i * 16);
      }
      const uint8_t* p = w.codes + k0 * w.row_stride + n0 / kBlock * Decoder::kBytes + b * Decoder::kBytes;
      const int64_t left = w.row_stride - (n0 / kBlock + b) * Decoder::kBytes;
      const BlockTiles place(lanes, n0 / kBlock + b);
      for (int64_t k = 0; k < deep; ++k, p += w.row_stride) {
        const Decoder codes(p, left, table);
        _mm_prefetch(reinterpret_cast<const char*>(p + kDeep * w.row_stride), _MM_HINT_T0);
        const V s = place.Of(scale.at[k]), z = kSubtracts ? place.Of(zero.at[k]) : s;
        V a[kM];
#pragma GCC unroll 2
        for (int m = 0; m < kM; ++m) {
          a[m] = Mul(Same(x[m * job.ldx + k0 + k]), s);
        }
        if (!kSubtracts && has_offset) {
          const V added = place.Of(zero.at[k]);
#pragma GCC unroll 2
          for (int m = 0; m < kM; ++m) offset[m] = MulAdd(Same(x[m * job.ldx + k0 + k]), added, offset[m]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; ++i) {
          V v = codes.At(i, table);
          if (kSubtracts) v = Sub(v, z);
#pragma GCC unroll 2
          for (int m = 0; m < kM; ++m) sum[m][i] = MulAdd(v, a[m], sum[m][i]);
        }
      }
#pragma GCC unroll 2
      for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; ++i) {
          if (has_offset) sum[m][i] = Add(sum[m][i], offset[m]);
          Store(total + m * padded + b * kBlock + i * 16, sum[m][i]);
        }
      }
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int64_t n = 0; n < padded; ++n) plain[n] = total[m * padded + n / kBlock * kBlock + n % kSteps * 16 + n % kBlock / kSteps];
    StoreOutputs(job, m0 + m, n0, outputs, plain);
  }
}

// A panel of rows k0 .., columns n0 .., decoded and scaled; the columns of a block are interleaved.
template <class Decoder, bool kHasZero>
static void FillRowsAcross(const Weight& w, int64_t n0, int64_t outputs, int64_t k0, int64_t count, float* rest, float* panel,
                           int64_t ldw) {
  constexpr int kSteps = Decoder::kSteps, kBlock = 16 * kSteps;
  constexpr int64_t kRowsOfScales = 16;
  const int64_t blocks = (outputs + kBlock - 1) / kBlock, first = n0 / w.col_tile;
  const int64_t tiles = (n0 + outputs - 1) / w.col_tile - first + 1;
  const ColumnLanes lanes(w, kBlock, first);
  const auto table = Decoder::TableOf(w);
  const ZeroParts parts(w.role);
  float *scales = rest, *zeros = rest + kRowsOfScales * tiles + 16;
  for (int64_t from = k0; from < k0 + count; from += kRowsOfScales) {
    const int64_t rows = k0 + count - from < kRowsOfScales ? k0 + count - from : kRowsOfScales;
    const ScalesOfRows scale(w, w.scale, w.unit, from, rows, first, tiles, scales);
    const ScalesOfRows zero = !kHasZero ? scale : ScalesOfRows(w, w.zero, 1.0f, from, rows, first, tiles, zeros);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = n0 / kBlock + b;
      const BlockTiles place(lanes, at);
      const uint8_t* p = w.codes + from * w.row_stride + at * Decoder::kBytes;
      float* to = panel + (from - k0) * ldw + b * kBlock;
      for (int64_t k = 0; k < rows; ++k, p += w.row_stride, to += ldw) {
        const Decoder codes(p, w.row_stride - at * Decoder::kBytes, table);
        const V s = place.Of(scale.at[k]), z = kHasZero ? place.Of(zero.at[k]) : s;
        const V before = parts.Subtracted(z), after = parts.Added(z);
#pragma GCC unroll 8
        for (int i = 0; i < kSteps; ++i) Store(to + i * 16, Scaled<kHasZero>(codes.At(i, table), s, before, after));
      }
    }
  }
}

// The scales or zero points of one row of tiles, a number for each column, in the order that BlockedX gives x.
template <int kSub>
static void BlockedScales(const Weight& w, const StoredScales& stored, int64_t row, int64_t blocks, float unit, float* plain, float* out) {
  const int64_t length = blocks * 16 * kSub;
  float* of_tiles = w.col_tile == 1 ? plain : out;  // which has room for as many, and is written last
  LoadScales(stored, row * w.tiles_per_row, w.tiles_per_row, unit, of_tiles);
  for (int64_t t = 0; w.col_tile > 1 && t < w.tiles_per_row; ++t) {
    for (int64_t c = t * w.col_tile; c < (t + 1) * w.col_tile && c < w.cols; ++c) plain[c] = of_tiles[t];
  }
  for (int64_t c = w.cols; c < length; ++c) plain[c] = 0.0f;
  Deinterleave<kSub>(plain, blocks, out);
}

// Columns are contracted, and the codes of a byte follow each other down a column: rows m0 and on of y, for rows [begin, end)
// of the weight.
template <class Decoder, bool kSubtracts, int kM>
static void DotScaled(const Job& job, int m0, int64_t begin, int64_t end) {
  constexpr int kSub = Decoder::kLaneBytes, kAlong = Decoder::kSteps / kSub, kBlock = 16 * kSub, kByteRows = Decoder::kByteRows;
  constexpr int kR = kAlong * kM >= 8 ? 1 : kAlong * kM >= 4 ? 2 : 4;  // groups of kAlong rows that share each load of x
  const Weight& w = job.w;
  const bool has_zero = w.role != Zero::kNone, has_offset = w.role == Zero::kOffset;
  const int64_t blocks = (w.cols + kBlock - 1) / kBlock, length = blocks * kBlock, byte_rows = ByteRows(w);
  const auto table = Decoder::TableOf(w);
  float* x = Workspace(length * (kM + 3) + 64);
  float *plain = x + length * kM, *scale = plain + length, *zero = scale + length;
  float y[kM][kFewOutputs];
  for (int64_t t0 = begin, t1 = end; t0 < end; t0 = t1) {
    const int64_t row = t0 / w.row_tile;
    t1 = (row + 1) * w.row_tile < end ? (row + 1) * w.row_tile : end;
    BlockedScales<kSub>(w, w.scale, row, blocks, w.unit, plain, scale);
    if (has_zero) BlockedScales<kSub>(w, w.zero, row, blocks, 1.0f, plain, zero);
    float offset[kM];
    UNROLL for (int m = 0; m < kM; ++m) {
      const float* from = job.x + (m0 + m) * job.ldx;
      V sum = Same(0.0f);
      for (int64_t c = 0; c < length; c += 16) {
        Store(x + m * length + c, Mul(Load(from + c), Load(scale + c)));
        if (has_offset) sum = MulAdd(Load(from + c), Load(zero + c), sum);
      }
      offset[m] = has_offset ? SumOfLanes(sum) : 0.0f;
    }
    for (int64_t r = t0; r < t1; r += kR * kAlong) {
      V sum[kR][kAlong][kM];
      const uint8_t* p[kR];
      int64_t there[kR];
#pragma GCC unroll 4
      for (int j = 0; j < kR; ++j) {
        const int64_t group = (r + j * kAlong < t1 ? r + j * kAlong : r) / kAlong * kByteRows;
        p[j] = w.codes + group * w.row_stride, there[j] = byte_rows - group;
#pragma GCC unroll 8
        for (int i = 0; i < kAlong; ++i) {
#pragma GCC unroll 2
          for (int m = 0; m < kM; ++m) sum[j][i][m] = Same(0.0f);
        }
      }
      for (int64_t b = 0; b < blocks; ++b) {
        const float *x_here = x + b * kBlock, *zero_here = zero + b * kBlock;
#pragma GCC unroll 4
        for (int j = 0; j < kR; ++j) {
          const uint8_t* bytes = p[j] + b * kBlock;
          const Decoder codes(bytes, w.row_stride, there[j], w.cols - b * kBlock);
          for (int i = 0; i < kByteRows; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(bytes + (kR * kByteRows + i) * w.row_stride), _MM_HINT_T0);
          }
#pragma GCC unroll 4
          for (int sub = 0; sub < kSub; ++sub) {
            const V z = kSubtracts ? Load(zero_here + sub * 16) : Same(0.0f);
#pragma GCC unroll 8
            for (int i = 0; i < kAlong; ++i) {
              V v = codes.At(sub * kAlong + i, table);
              if (kSubtracts) v = Sub(v, z);
#pragma GCC unroll 2
              for (int m = 0; m < kM; ++m) sum[j][i][m] = MulAdd(v, Load(x_here + m * length + sub * 16), sum[j][i][m]);
            }
          }
        }
      }
      UNROLL for (int j = 0; j < kR; ++j) {
        UNROLL for (int i = 0; i < kAlong; ++i) {
          if (r + j * kAlong + i >= t1) continue;
          UNROLL for (int m = 0; m < kM; ++m) y[m][r + j * kAlong + i - begin] = SumOfLanes(sum[j][i][m]) + offset[m];
        }
      }
    }
  }
  for (int m = 0; m < kM; ++m) StoreOutputs(job, m0 + m, begin, end - begin, y[m]);
}

// The scales or zero points of 16 lanes, each of `along` rows from n on, for `tiles` tiles of columns: those of a tile together.
static void TransposedScales(const Weight& w, const StoredScales& stored, float unit, int64_t n, int64_t along, int64_t first, int64_t tiles,
                         float* plain, float* out) {
  const int64_t room = (tiles + 15) / 16 * 16, row = n / w.row_tile;
  const auto tile_row = [&](int64_t lane) {
    const int64_t r = n + lane * along;
    return (r < w.rows ? r : w.rows - 1) / w.row_tile;
  };
  if (tile_row(15) == row) {
    LoadScales(stored, row * w.tiles_per_row + first, tiles, unit, plain);
    for (int64_t t = 0; t < tiles; ++t) Store(out + 16 * t, Same(plain[t]));
    return;
  }
  for (int64_t lane = 0; lane < 16; ++lane) {
    LoadScales(stored, tile_row(lane) * w.tiles_per_row + first, tiles, unit, plain + lane * room);
  }
  for (int64_t t = 0; t < room; t += 16) Transpose(plain + t, room, out + 16 * t, 16);
}

// The decoder of lane `lane` of every vector before the transposition, or of one of its parts.
template <class Decoder>
static inline Decoder TransposedLane(const __m512i (*raw)[16], int64_t lane, int part) {
  if constexpr (Decoder::kByteRows == 1) {
    return Decoder(raw[0][lane], part);
  } else {
    Decoder codes;
    UNROLL for (int j = 0; j < Decoder::kByteRows; ++j) codes.raw[j] = raw[j][lane];
    return codes;
  }
}

// A panel of rows n0 .., columns k0 .., whose bytes contain codes of several rows, decoded and scaled; the rows of a block are
// interleaved.
template <class Decoder, bool kHasZero>
static void FillTransposed(const Weight& w, int64_t n0, int64_t outputs, int64_t k0, int64_t count, float* rest, float* panel,
                       int64_t ldw) {
  constexpr int kSub = Decoder::kLaneBytes, kAlong = Decoder::kSteps / kSub, kByteRows = Decoder::kByteRows;
  const int64_t first = k0 / w.col_tile, tiles = (k0 + count - 1) / w.col_tile - first + 1, room = (tiles + 15) / 16 * 16;
  const auto table = Decoder::TableOf(w);
  const ZeroParts parts(w.role);
  float *plain = rest, *scale = plain + 16 * room, *zero = scale + 16 * room;
  for (int64_t n = 0; n < outputs; n += 16 * kAlong) {
    TransposedScales(w, w.scale, w.unit, n0 + n, kAlong, first, tiles, plain, scale);
    if (kHasZero) TransposedScales(w, w.zero, 1.0f, n0 + n, kAlong, first, tiles, plain, zero);
    for (int64_t b = 0; b < count; b += 64) {
      __m512i raw[kByteRows][16];
      for (int j = 0; j < kByteRows; ++j) {
        for (int i = 0; i < 16; ++i) {
          const int64_t row = ((n0 + n) / kAlong + i) * kByteRows + j, last = ByteRows(w) - 1;
          raw[j][i] = BytesAt(w.codes + (row < last ? row : last) * w.row_stride + k0 + b, w.cols - k0 - b);
        }
        TransposeWords(raw[j]);
      }
      int64_t tile = (k0 + b) / w.col_tile - first, next = (first + tile + 1) * w.col_tile - k0;
      for (int64_t k = b; k < count && k < b + 64; k += kSub) {
        const Decoder codes = TransposedLane<Decoder>(raw, (k - b) / 4, (k - b) % 4 / kSub);
#pragma GCC unroll 4
        for (int sub = 0; sub < kSub; ++sub) {
          if (k + sub >= next && tile + 1 < tiles) ++tile, next += w.col_tile;
          const V s = Load(scale + 16 * tile), z = kHasZero ? Load(zero + 16 * tile) : s;
          const V before = parts.Subtracted(z), after = parts.Added(z);
#pragma GCC unroll 8
          for (int i = 0; i < kAlong; ++i) {
            Store(panel + (k + sub) * ldw + n + i * 16, Scaled<kHasZero>(codes.At(sub * kAlong + i, table), s, before, after));
          }
        }
      }
    }
  }
}

// A few rows of x, two at a time: the sums of more would not fit in registers.
template <class Decoder, bool kSubtracts>
static void FewAcross(const Job& job, int64_t begin, int64_t count) {
  for (int m = 0; m + 1 < job.M; m += 2) SumRows<Decoder, kSubtracts, 2>(job, m, begin, count);
  if (job.M % 2 == 1) SumRows<Decoder, kSubtracts, 1>(job, static_cast<int>(job.M) - 1, begin, count);
}

template <class Decoder, bool kSubtracts>
static void FewTransposed(const Job& job, int64_t begin, int64_t count) {
  const int64_t end = begin + count < job.w.rows ? begin + count : job.w.rows;
  for (int m = 0; m + 1 < job.M; m += 2) DotScaled<Decoder, kSubtracts, 2>(job, m, begin, end);
  if (job.M % 2 == 1) DotScaled<Decoder, kSubtracts, 1>(job, static_cast<int>(job.M) - 1, begin, end);
}

#endif
