// Random products of integers in buffers of exactly the size that they must have, for a sanitizer to watch; `make test-sanitize`
// builds and runs it. Every instruction set must give the same bits as plain loops.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "qmatmul/cpu/int8/kernels.h"

using namespace fewbit;

static std::mt19937 engine(7);
static int64_t Any(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }

static int NumberAt(const IntegerJob& job, bool is_signed, int64_t n, int64_t k) {
  const int64_t byte = k * job.bits / 8, at = job.contracts_cols ? n * job.row_stride + byte : byte * job.row_stride + n;
  const int code = job.bits == 8 ? job.w[at] : job.w[at] >> k % 2 * 4 & 15;
  return is_signed && code >= 1 << (job.bits - 1) ? code - (1 << job.bits) : code;
}

static int Failures(int number) {
  IntegerJob job{};
  job.bits = Any(0, 1) ? 8 : 4, job.contracts_cols = Any(0, 1);
  job.M = Any(0, 1) ? Any(1, 7) : Any(1, 20), job.N = number % 20 == 0 ? Any(2040, 2060) : Any(1, 90), job.K = Any(1, 1400);
  job.tile = Any(0, 1) ? job.K : Any(0, 1) ? 2 * Any(4, 350) : 8 * Any(1, 20);
  const bool is_signed = Any(0, 1), has_w_zero = Any(0, 1), has_x_zero = Any(0, 1), is_tiled = Any(0, 1);  // x
  job.offset = is_signed ? 1 << (job.bits - 1) : 0, job.largest = (1 << job.bits) - 1;
  const int64_t bytes = (job.K * job.bits + 7) / 8, tiles = job.tiles(), n_tile = Any(1, 3), m_tile = Any(1, 3);
  job.row_stride = job.contracts_cols ? bytes : job.N;
  std::vector<uint8_t> w(bytes * job.N);
  for (uint8_t& byte : w) byte = static_cast<uint8_t>(Any(0, 255));
  std::vector<int8_t> x(job.M * job.K);
  for (int8_t& code : x) code = static_cast<int8_t>(Any(-128, 127));
  const int64_t n_count = (job.N - 1) / n_tile + 1, m_count = (job.M - 1) / m_tile + 1;
  std::vector<float> w_scale(n_count * tiles), x_scale(m_count * tiles);
  for (float& scale : w_scale) scale = static_cast<float>(Any(1, 100)) / 64;
  for (float& scale : x_scale) scale = static_cast<float>(Any(1, 100)) / 37;
  std::vector<int32_t> w_zero(w_scale.size()), x_zero(x_scale.size());
  for (int32_t& zero : w_zero) zero = static_cast<int32_t>(Any(-9, 9));
  for (int32_t& zero : x_zero) zero = static_cast<int32_t>(Any(-128, 127));
  job.w = w.data();
  job.w_scale = {w_scale.data(), n_tile, tiles, 1}, job.x_scale = {x_scale.data(), m_tile, tiles, is_tiled || tiles == 1};
  job.w_zero = {has_w_zero ? w_zero.data() : nullptr, n_tile, tiles, 1};
  job.x_zero = {has_x_zero ? x_zero.data() : nullptr, m_tile, tiles, 1};
  const std::vector<Segment> segments = SegmentsOf(job);
  int failures = 0;
  for (int level = 0; level < 5; ++level) {  // some of them twice, where the machine has no other
    const Isa isa = ByteDotIsaOf(level);
    const Kernels kernels = KernelsFor(isa);
    std::vector<int8_t> laid(job.M * kernels.row_bytes(job, segments));
    std::vector<int32_t> of_x(job.M * tiles * TilesOfX::kBytes / 4);
    const TilesOfX tiles_of_x(job, of_x.data());
    std::vector<float> y(job.M * job.N, -1.0f);
    for (int64_t m = 0; m < job.M; m += kernels.rows) kernels.prepare(job, segments, x.data(), m, laid.data(), tiles_of_x);
    job.x = laid.data(), tiles_of_x.SetIn(&job), job.y = y.data();
    for (int64_t chunk = 0; chunk < kernels.chunks(job); ++chunk) kernels.run(job, segments, chunk);
    const bool scales_last = tiles > 1 && !is_tiled, fuses = !FEWBIT_X86 || level > 0;
    for (int64_t m = 0; m < job.M; ++m) {
      for (int64_t n = 0; n < job.N; ++n) {
        float total = 0;
        for (int64_t t = 0; t < tiles; ++t) {
          int32_t sum = 0;
          for (int64_t k = t * job.tile; k < job.K && k < (t + 1) * job.tile; ++k) {
            const int zero = has_w_zero ? job.w_zero.At(n, t) : 0, x_zero_here = has_x_zero ? job.x_zero.At(m, t) : 0;
            sum += (x[m * job.K + k] - x_zero_here) * (NumberAt(job, is_signed, n, k) - zero);
          }
          const float row = scales_last ? 1 : job.x_scale.At(m, t), left = static_cast<float>(sum) * row, right = job.w_scale.At(n, t);
          total = t == 0 ? left * right : fuses ? std::fma(left, right, total) : left * right + total;
        }
        if (scales_last) total *= job.x_scale.At(m, 0);
        failures += y[m * job.N + n] != total;
      }
    }
    if (failures) {
      std::printf("case %d, %s: %d wrong of %ld; bits %d contracts_cols %d signed %d zeros %d %d M %ld N %ld K %ld tile %ld\n",
                  number, NameOf(isa), failures, static_cast<long>(job.M * job.N), job.bits, job.contracts_cols, is_signed,
                  has_w_zero, has_x_zero, static_cast<long>(job.M), static_cast<long>(job.N), static_cast<long>(job.K),
                  static_cast<long>(job.tile));
      return 1;
    }
  }
  return 0;
}

static int BlockFailures(int number) {
  BlockJob job{};
  const int bits = Any(0, 1) ? static_cast<int>(Any(1, 8)) : 4;
  const bool is_byte = bits == 8, is_signed = Any(0, 1), is_tiled = Any(0, 1), is_ggml = !is_byte && Any(0, 2) == 0;
  const bool is_wide = Any(0, 1), is_ordered = Any(0, 1);  // the table
  const int64_t tile = Any(0, 9) == 0 ? 704 : is_ggml ? 32 * Any(1, 3) : 16 * Any(1, 6);
  job.M = Any(0, 1) ? Any(1, 3) : Any(1, 20), job.K = Any(1, 700);
  const bool contracts_cols = Any(0, 1);
  job.N = number % 20 != 0 ? Any(1, 40) : contracts_cols ? Any(100, 140) : Any(2040, 2060);
  const int64_t depth = is_ggml ? (job.K + 31) / 32 * 32 : job.K, tiles = (depth - 1) / tile + 1, bytes = (depth * bits + 7) / 8;
  const int64_t unit = is_ggml ? 32 : 16, part = unit * Any(1, tile / unit);
  job.block = Any(0, 1) || tile % part != 0 ? tile : part;
  const int64_t block = job.block, blocks = (depth - 1) / block + 1;
  std::vector<int32_t> order(32);
  for (int i = 0; i < 32; ++i) order[i] = i / 2 + i % 2 * 16;
  if (is_ggml) job.order = order.data(), job.group = 32;
  const int64_t n_tile = Any(1, 3), n_tiles = (job.N - 1) / n_tile + 1;
  job.contracts_cols = contracts_cols, job.w.packed_cols = contracts_cols, job.w.bits = bits, job.w.unit = 0.5f;
  job.w.rows = contracts_cols ? job.N : depth, job.w.cols = contracts_cols ? depth : job.N;
  job.w.row_stride = contracts_cols ? bytes : job.N, job.w.tiles_per_row = contracts_cols ? tiles : n_tiles;
  job.w.row_tile = contracts_cols ? n_tile : tile, job.w.col_tile = contracts_cols ? tile : n_tile;
  job.w.role = static_cast<Zero>(Any(0, 2));
  std::vector<uint8_t> codes(bytes * job.N);
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(Any(0, 255));
  std::vector<int8_t> x(job.M * job.K), of_codes(1 << bits);
  for (int8_t& code : x) code = static_cast<int8_t>(Any(-128, 127));
  for (int8_t& value : of_codes) value = static_cast<int8_t>(is_wide ? Any(-127, 127) : Any(-31, 32));
  const int half = is_signed ? 1 << (bits - 1) : 0;  // numbers in the order of two's complement, or of the codes
  for (int i = 0; is_ordered && !is_byte && i < 1 << bits; ++i) of_codes[i] = static_cast<int8_t>((i ^ half) - half);
  std::vector<float> w_scale(n_tiles * tiles), w_zero(w_scale.size()), x_scale(job.M * (is_tiled ? blocks : 1));
  for (float& scale : w_scale) scale = static_cast<float>(Any(1, 100)) / 64;
  for (float& scale : x_scale) scale = static_cast<float>(Any(1, 100)) / 37;
  for (float& zero : w_zero) zero = static_cast<float>(Any(-9, 9));
  job.w.codes = codes.data();
  const ScaleType type = static_cast<ScaleType>(Any(0, 2));  // floats of 32 bits, or of 16, in which all these numbers are exact
  const auto shortened = [&](const std::vector<float>& numbers) {
    std::vector<uint16_t> bits_of(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) bits_of[i] = type == ScaleType::kBF16 ? BrainOf(numbers[i]) : HalfOf(numbers[i]);
    return bits_of;
  };
  const std::vector<uint16_t> short_scale = shortened(w_scale), short_zero = shortened(w_zero);
  const bool is_short = type != ScaleType::kF32;
  job.w.scale = {type, is_short ? static_cast<const void*>(short_scale.data()) : w_scale.data(), nullptr};
  job.w.zero = {type, is_short ? static_cast<const void*>(short_zero.data()) : w_zero.data(), nullptr};
  job.x_scale = {x_scale.data(), 1, is_tiled ? blocks : 1, is_tiled};
  if (is_byte) SetNumbers(is_signed, &job);
  else SetNumbers(of_codes.data(), &job);
  const auto byte_at = [&](int64_t n, int64_t k) { return contracts_cols ? codes[n * bytes + k] : codes[k * job.N + n]; };
  const auto number_at = [&](int64_t n, int64_t stream) {
    if (is_byte) return is_signed ? static_cast<int8_t>(byte_at(n, stream)) : static_cast<int>(byte_at(n, stream));
    int code = 0;
    for (int b = 0; b < bits; ++b) {
      const int64_t at = stream * bits + b;
      code |= (byte_at(n, at / 8) >> at % 8 & 1) << b;
    }
    return static_cast<int>(of_codes[code]);
  };
  for (int way = 0; way < 10; ++way) {
    const int level = way / 2;
    const bool by_panels = way % 2;
    const Isa isa = ByteDotIsaOf(level);
    const Kernels kernels = KernelsFor(isa);
    std::vector<float> y(job.M * job.N, -1.0f);
    std::vector<BlockOfX> x_blocks(job.M * blocks);
    job.y = y.data();
    if (by_panels) {
      IntegerJob panels = kernels.panels_of(job);
      const std::vector<Segment> segments = SegmentsOf(panels);
      std::vector<int8_t> laid(job.M * kernels.row_bytes(panels, segments)), rows(job.M * depth);
      for (int64_t m = 0; m < job.M; ++m) OrderRow(job, x.data() + m * job.K, rows.data() + m * depth);
      std::vector<int32_t> of_x(job.M * blocks * TilesOfX::kBytes / 4);
      const TilesOfX tiles_of_x(panels, of_x.data());
      for (int64_t m = 0; m < job.M; m += kernels.rows) kernels.prepare(panels, segments, rows.data(), m, laid.data(), tiles_of_x);
      panels.x = laid.data(), tiles_of_x.SetIn(&panels);
      if (job.M > 4 || !contracts_cols) for (int64_t chunk = 0; chunk < kernels.chunks(panels); ++chunk) kernels.run(panels, segments, chunk);
      else continue;  // whole rows, which the handler never asks for
    } else if (!contracts_cols) {
      continue;
    } else {
      std::vector<int8_t> laid(job.M * kernels.block_row_bytes(job));
      job.x = laid.data(), job.x_blocks = x_blocks.data();
      for (int64_t m = 0; m < job.M; ++m) kernels.lay_blocks(job, x.data(), m, laid.data());
      for (int64_t chunk = 0; chunk < kernels.block_chunks(job); ++chunk) kernels.run_blocks(job, chunk);
    }
    const bool scales_last = blocks > 1 && !is_tiled, fuses = !FEWBIT_X86 || level > 0;
    const auto plus = [&](float a, float b, float c) { return fuses ? std::fma(a, b, c) : a * b + c; };
    int failures = 0;
    for (int64_t m = 0; m < job.M; ++m) {
      for (int64_t n = 0; n < job.N; ++n) {
        float total = 0;
        for (int64_t t = 0; t < blocks; ++t) {
          int32_t sum = 0, x_sum = 0;
          const int64_t at = contracts_cols ? n / n_tile * tiles + t / job.share() : t / job.share() * n_tiles + n / n_tile;
          const float zero = w_zero[at], scale = w_scale[at] * 0.5f;
          for (int64_t place = t * block; place < depth && place < (t + 1) * block; ++place) {
            const int64_t k = is_ggml ? place / 32 * 32 + order[place % 32] : place;
            if (k >= job.K) continue;
            const int less = job.w.role == Zero::kWhole ? static_cast<int>(zero) : 0;
            sum += x[m * job.K + k] * (number_at(n, place) - less), x_sum += x[m * job.K + k];
          }
          const float row = job.x_scale.At(m, t), left = scales_last ? static_cast<float>(sum) : static_cast<float>(sum) * row;
          total = t == 0 ? left * scale : plus(left, scale, total);
          const float of_x = scales_last ? static_cast<float>(x_sum) : row * static_cast<float>(x_sum);
          if (job.w.role == Zero::kOffset) total = plus(zero, of_x, total);
        }
        if (scales_last) total *= job.x_scale.At(m, 0);
        failures += y[m * job.N + n] != total;
      }
    }
    if (failures) {
      std::printf("blocks %d, %s%s: %d wrong of %ld; bits %d contracts_cols %d role %d ggml %d tiled %d M %ld N %ld K %ld tile %ld block %ld\n", number, NameOf(isa),
                  by_panels ? " by panels" : "", failures, static_cast<long>(job.M * job.N), bits, contracts_cols, static_cast<int>(job.w.role), is_ggml, is_tiled,
                  static_cast<long>(job.M), static_cast<long>(job.N), static_cast<long>(job.K), static_cast<long>(tile), static_cast<long>(block));
      return 1;
    }
  }
  return 0;
}

int main(int count, char** seed) {
  if (count > 1) engine.seed(static_cast<uint32_t>(std::atoll(seed[1])));
  int failures = 0;
  for (int number = 0; number < 120; ++number) failures += Failures(number) + BlockFailures(number);
  std::printf("240 products of integers, %d of them wrong\n", failures);
  return failures != 0;
}
