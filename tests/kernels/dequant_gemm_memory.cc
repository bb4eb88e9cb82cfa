// Random products in buffers of exactly the size that they must have, for a sanitizer to watch: shapes, tiles, widths and
// alignments are drawn. Every instruction set must agree with plain loops in double.
//
//   dequant_gemm_memory [SEED [COUNT]]
//
// `make test-sanitize` runs it once, `make fuzz` with one seed after another.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "qmatmul/cpu/dequant/kernels.h"

using namespace fewbit;

static std::mt19937 engine;
static int64_t Any(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }

// The code at row r and column c, bit by bit.
static int CodeAt(const Weight& w, int64_t r, int64_t c) {
  int code = 0;
  for (int i = 0; i < w.bits; ++i) {
    const int64_t bit = (w.packed_cols ? c : r) * w.bits + i;
    const uint8_t byte = w.packed_cols ? w.codes[r * w.row_stride + bit / 8] : w.codes[bit / 8 * w.row_stride + c];
    code |= (byte >> bit % 8 & 1) << i;
  }
  return code;
}

static int Failures(int number) {
  Job job{};
  Weight& w = job.w;
  w.bits = static_cast<int>(Any(1, 8)), w.packed_cols = Any(0, 1), w.rows = Any(1, 90), w.cols = Any(1, 700);
  if (Any(0, 9) == 0) w.rows = Any(1024, 1200), w.cols = Any(1, 40);  // wide panels
  job.contracts_cols = Any(0, 1);
  w.row_tile = Any(0, 1) ? 1 : Any(0, 1) ? 16 * Any(1, 6) : Any(1, w.rows), w.col_tile = Any(0, 2) ? 32 * Any(1, 4) : Any(1, w.cols);
  w.tiles_per_row = (w.cols - 1) / w.col_tile + 1;
  w.role = static_cast<Zero>(Any(0, 2)), w.unit = 0.5f;
  const int64_t packed = (w.packed_cols ? w.cols : w.rows) * w.bits, bytes = (packed + 7) / 8;
  w.row_stride = w.packed_cols ? bytes : w.cols;
  const int64_t skew = Any(0, 63);
  std::vector<uint8_t> codes(skew + (w.packed_cols ? w.rows : bytes) * w.row_stride);
  for (uint8_t& byte : codes) byte = static_cast<uint8_t>(Any(0, 255));
  std::vector<float> values(256), scales(((w.rows - 1) / w.row_tile + 1) * w.tiles_per_row), zeros(scales.size());
  w.kind = w.bits >= 4 ? static_cast<Codes>(Any(0, 2)) : Codes::kTable;
  for (int i = 0; i < 256; ++i) {
    const int code = i & ((1 << w.bits) - 1), sign = 1 << (w.bits - 1);
    values[i] = static_cast<float>(w.kind == Codes::kTable ? code - 3 : w.kind == Codes::kSigned ? (code ^ sign) - sign : code);
  }
  for (float& scale : scales) scale = static_cast<float>(Any(1, 100)) / 64;
  for (float& zero : zeros) zero = static_cast<float>(Any(0, 9));
  w.codes = codes.data() + skew, w.values = values.data();
  w.scale = {ScaleType::kF32, scales.data(), nullptr}, w.zero = {ScaleType::kF32, zeros.data(), nullptr};
  job.M = Any(0, 1) ? Any(1, 4) : Any(0, 2) ? Any(5, 20) : Any(64, 100), job.K = job.contracted(), job.N = job.outputs();
  const bool is_brain = Any(0, 1);  // x
  const int x_bits = is_brain ? 8 : 24;
  int failures = 0;
  for (int level = 0; level < 4; ++level) {  // the best one twice, where there is no AMX
    const Isa isa = TileIsaOf(level);
    const Kernels kernels = KernelsFor(isa);
    const int64_t steps = kernels.steps(job), length = (job.K + 511) / 512 * 512;
    job.ldx = length + 16, job.ld_sums = SumsOfRow(w);
    std::vector<float> x(job.M * job.ldx, 0.0f), blocked(x.size()), sums(job.M * job.ld_sums), y(job.M * job.N, NAN);
    for (int64_t m = 0; m < job.M; ++m) {
      for (int64_t k = 0; k < job.K; ++k) x[m * job.ldx + k] = std::ldexp(static_cast<float>(Any(-(1 << x_bits), 1 << x_bits)), 3 - x_bits);
      if (steps > 1) BlockedX(&x[m * job.ldx], length, steps, &blocked[m * job.ldx]);
      if (job.contracts_cols) TileSums(&x[m * job.ldx], w, &sums[m * job.ld_sums]);
    }
    job.x = steps > 1 ? blocked.data() : x.data(), job.x_sums = sums.data(), job.y = y.data();
    const bool in_tiles = is_brain && kernels.takes_bfloat16(job);
    std::vector<uint16_t> row(job.K), tiles(in_tiles ? job.tile_numbers() : 0);
    for (int64_t m = 0; in_tiles && m < job.M; ++m) {
      for (int64_t k = 0; k < job.K; ++k) row[k] = BrainOf(x[m * job.ldx + k]);
      LayTiles(job, m, row.data(), nullptr, 0, tiles.data());
    }
    job.x_tiles = in_tiles ? tiles.data() : nullptr;
    for (int64_t chunk = 0; chunk < kernels.chunks(job); ++chunk) kernels.run(job, chunk);
    for (int64_t m = 0; m < job.M; ++m) {
      for (int64_t n = 0; n < job.N; ++n) {
        double sum = 0, magnitude = 0;
        for (int64_t k = 0; k < job.K; ++k) {
          const int64_t r = job.contracts_cols ? n : k, c = job.contracts_cols ? k : n;
          const int64_t tile = r / w.row_tile * w.tiles_per_row + c / w.col_tile;
          double value = values[CodeAt(w, r, c)];
          if (w.role == Zero::kWhole) value -= zeros[tile];
          value *= scales[tile] * 0.5;
          if (w.role == Zero::kOffset) value += zeros[tile];
          sum += value * x[m * job.ldx + k];
          magnitude += (std::fabs(value) + 200) * std::fabs(x[m * job.ldx + k]);
        }
        failures += !(std::fabs(y[m * job.N + n] - sum) <= 1e-6 * magnitude + 1e-6);
      }
    }
    if (failures) {
      std::printf("case %d, %s: %d wrong of %ld; bits %d packed_cols %d contracts_cols %d rows %ld cols %ld tiles %ld %ld role %d M %ld\n",
                  number, NameOf(isa), failures, static_cast<long>(job.M * job.N), w.bits, w.packed_cols, job.contracts_cols,
                  static_cast<long>(w.rows), static_cast<long>(w.cols), static_cast<long>(w.row_tile),
                  static_cast<long>(w.col_tile), static_cast<int>(w.role), static_cast<long>(job.M));
      return 1;
    }
  }
  return 0;
}

int main(int argc, char** argv) {
  const unsigned long seed = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 7;
  const int count = argc > 2 ? std::atoi(argv[2]) : 400;
  engine.seed(seed);
  int failures = 0;
  for (int number = 0; number < count; ++number) failures += Failures(number);
  std::printf("seed %lu: %d products, %d of them wrong\n", seed, count, failures);
  return failures != 0;
}
