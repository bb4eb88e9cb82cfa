// Random products of integers in buffers of exactly the size that they must have, for a sanitizer to watch; `make test-sanitize`
// builds and runs it. Every instruction set must give the same bits as plain loops.
#include <cmath>
#include <cstdio>
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
  job.offset = is_signed ? 1 << (job.bits - 1) : 0;
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
  for (int level = 0; level < 4; ++level) {  // some of them twice, where the machine has no other
    const Isa isa = ByteDotIsaOf(level);
    const Kernels kernels = KernelsFor(isa);
    std::vector<int8_t> laid(job.M * kernels.row_bytes(job, segments));
    std::vector<int32_t> sums(job.M * tiles);
    std::vector<float> y(job.M * job.N, -1.0f);
    for (int64_t m = 0; m < job.M; m += kernels.rows) kernels.prepare(job, segments, x.data(), m, laid.data(), sums.data());
    job.x = laid.data(), job.x_sums = sums.data(), job.y = y.data();
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

int main() {
  int failures = 0;
  for (int number = 0; number < 120; ++number) failures += Failures(number);
  std::printf("120 products of integers, %d of them wrong\n", failures);
  return failures != 0;
}
