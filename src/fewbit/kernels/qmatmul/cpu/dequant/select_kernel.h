// Which kernel a job takes. Included in the namespace of an instruction set.

struct Choice {
  void (*few)(const Job&, int64_t begin, int64_t count);  // for the first `rows` rows of x; null: panels
  Fill fill;                                              // of panels in registers; null: row by row
  int64_t steps, interleave;                                   // how x is laid out in blocks, and how outputs come from panels
  int64_t rows = 4;
};

#if FEWBIT_HAS_LOOKUP

static bool IsInteger(const Weight& w) { return w.kind == Codes::kSigned || w.kind == Codes::kUnsigned; }

#endif

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

template <class Row, class Column, class Across, bool kHasZero, bool kSubtracts>
static Choice WithRole(const Job& job, bool across) {
  static decltype(Choice::few) const sums[] = {SumColumns<Column, kSubtracts, 1>, SumColumns<Column, kSubtracts, 2>,
                                               SumColumns<Column, kSubtracts, 3>, SumColumns<Column, kSubtracts, 4>};
  constexpr int kSub = Column::kLaneBytes;
  const bool is_few = job.M <= kFewRows;
  if (across && job.contracts_cols) {
    return {is_few ? FewTransposed<Column, kSubtracts> : nullptr, FillTransposed<Column, kHasZero>, kSub, Column::kSteps / kSub};
  }
  if (across) return {is_few ? FewAcross<Across, kSubtracts> : nullptr, FillRowsAcross<Across, kHasZero>, 1, Across::kSteps};
  if (job.contracts_cols) {
    const int64_t rows = job.M < 2 ? 1 : job.M < 4 ? 2 : 4;
    const auto dots = rows == 1 ? DotRows<Row, kSubtracts, 1> : rows == 2 ? DotRows<Row, kSubtracts, 2> : DotRows<Row, kSubtracts, 4>;
    return {job.M <= kSeveral ? dots : nullptr, FillDots<Row, kHasZero>, Row::kSteps, 1, rows};
  }
  return {is_few ? sums[job.M - 1] : nullptr, FillColumns<Column, kHasZero>, 1, kSub};
}

// By a decoder of codes along a row, by one of codes down columns, or by one of codes along a row that are outputs.
template <class Row, class Column = Row, class Across = Row>
static Choice With(const Job& job) {
  const Weight& w = job.w;
  const bool dots = job.contracts_cols, is_byte = w.bits == 8;
  const int64_t tile = dots ? w.col_tile : w.row_tile, other = dots ? w.row_tile : w.col_tile;
  const bool is_whole = tile >= job.contracted(), is_other_whole = other >= job.outputs();
  // The codes of a lane, or of a byte, must share a scale and be neighbours along the contraction, or else along the outputs.
  constexpr int64_t kDown = Column::kSteps / Column::kLaneBytes;
  const bool along = (is_byte || w.packed_cols == dots) && (is_whole || tile % (dots ? Row::kSteps : kDown) == 0);
  const int64_t shared = dots ? kDown : Across::kSteps;
  bool across = (is_byte || w.packed_cols != dots) && (is_other_whole || (other % shared == 0 && other >= 8));
  across = across && (!along || (!is_whole && tile < 16));
  if (!along && !across) return Choice{nullptr, nullptr, 1, 1};
  if (w.role == Zero::kWhole) return WithRole<Row, Column, Across, true, true>(job, across);
  if (w.role == Zero::kOffset) return WithRole<Row, Column, Across, true, false>(job, across);
  return WithRole<Row, Column, Across, false, false>(job, across);
}

// The decoders in three translation units, which compile in parallel: codes of 1, 2 and 4 bits, of 3 to 7, and of 8.
Choice NarrowChoiceOf(const Job& job);
Choice WideChoiceOf(const Job& job);
Choice ByteChoiceOf(const Job& job);

#if FEWBIT_IN_UNIT(2)

Choice NarrowChoiceOf(const Job& job) {
  if (job.w.bits == 1) return With<Narrow<1>, Narrow<1>, Eights<1>>(job);
  if (job.w.bits == 2) return With<Narrow<2>, Narrow<2>, Eights<2>>(job);
  return With<Narrow<4>, Narrow<4>, Eights<4>>(job);
}

static Choice ChoiceOf(const Job& job) {
  if (job.w.bits == 8) return ByteChoiceOf(job);
  return job.w.bits == 1 || job.w.bits == 2 || job.w.bits == 4 ? NarrowChoiceOf(job) : WideChoiceOf(job);
}

#endif
#if FEWBIT_IN_UNIT(3)

Choice WideChoiceOf(const Job& job) {
  if (job.w.bits == 3) return With<WideRow<3>, WideColumn<3>>(job);
  if (job.w.bits == 5) return With<WideRow<5>, WideColumn<5>>(job);
  if (job.w.bits == 6) return With<WideRow<6>, WideColumn<6>>(job);
  if (IsInteger(job.w)) return With<WideRow<7, Whole<7>>, WideColumn<7, Whole<7>>>(job);
  return Choice{nullptr, nullptr, 1, 1};
}

#endif
#if FEWBIT_IN_UNIT(4)

Choice ByteChoiceOf(const Job& job) {
  if (IsInteger(job.w)) return With<Bytes, Narrow<8, Whole<8>>>(job);
  if (job.w.kind == Codes::kE4M3) return With<Float8<true>>(job);
  if (job.w.kind == Codes::kE5M2) return With<Float8<false>>(job);
  return Choice{nullptr, nullptr, 1, 1};
}

#endif

#elif FEWBIT_HAS_LOOKUP

// One row of x has room for its sums in registers; each kernel more is time that the build takes.
template <class Row, class Column, bool kHasZero, bool kSubtracts>
static Choice WithRole(const Job& job) {
  if (!job.contracts_cols) {
    return {job.M == 1 ? SumColumns<Column, kSubtracts, 1> : nullptr, FillColumns<Column, kHasZero>, 1, Column::kLaneBytes};
  }
  return {job.M == 1 ? DotRows<Row, kSubtracts, 1> : nullptr, FillDots<Row, kHasZero>, Row::kSteps, 1};
}

template <class Row, class Column = Row>
static Choice With(const Job& job) {
  const Weight& w = job.w;
  const int64_t along = job.contracts_cols ? Row::kSteps : Column::kSteps / Column::kLaneBytes;
  const int64_t tile = job.contracts_cols ? w.col_tile : w.row_tile;
  if ((w.bits < 8 && w.packed_cols != job.contracts_cols) || (tile < job.contracted() && tile % along != 0)) {
    return Choice{nullptr, nullptr, 1, 1};
  }
  if (w.role == Zero::kWhole) return WithRole<Row, Column, true, true>(job);
  if (w.role == Zero::kOffset) return WithRole<Row, Column, true, false>(job);
  return WithRole<Row, Column, false, false>(job);
}

static Choice ChoiceOf(const Job& job) {
  if (job.w.bits == 1) return With<Narrow<1>>(job);
  if (job.w.bits == 2) return With<Narrow<2>>(job);
  if (job.w.bits == 3) return With<WideRow<3>, WideColumn<3>>(job);
  if (job.w.bits == 4 && job.w.kind == Codes::kSigned) return With<Narrow<4, Converted<4, true>>>(job);
  if (job.w.bits == 4 && job.w.kind == Codes::kUnsigned) return With<Narrow<4, Converted<4, false>>>(job);
  if (job.w.bits == 4) return With<Narrow<4>>(job);
  if (job.w.bits == 5 && IsInteger(job.w)) return With<WideRow<5, Whole<5>>, WideColumn<5, Whole<5>>>(job);
  if (job.w.bits == 6 && IsInteger(job.w)) return With<WideRow<6, Whole<6>>, WideColumn<6, Whole<6>>>(job);
  if (job.w.bits == 7 && IsInteger(job.w)) return With<WideRow<7, Whole<7>>, WideColumn<7, Whole<7>>>(job);
  if (job.w.kind == Codes::kSigned && job.w.bits == 8) return With<Narrow<8, Converted<8, true>>>(job);
  if (job.w.kind == Codes::kUnsigned && job.w.bits == 8) return With<Narrow<8, Converted<8, false>>>(job);
#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX2
  if (job.w.kind == Codes::kE2M3) return With<WideRow<6, Float6<3>>, WideColumn<6, Float6<3>>>(job);
  if (job.w.kind == Codes::kE3M2) return With<WideRow<6, Float6<2>>, WideColumn<6, Float6<2>>>(job);
#endif
  if (job.w.bits == 6) return With<WideRow<6>, WideColumn<6>>(job);
  if (job.w.kind == Codes::kE4M3) return With<Float8<true>>(job);
  if (job.w.kind == Codes::kE5M2) return With<Float8<false>>(job);
  return Choice{nullptr, nullptr, 1, 1};
}

#else

static Choice ChoiceOf(const Job&) { return Choice{nullptr, nullptr, 1, 1}; }

#endif

#if FEWBIT_LEVEL != FEWBIT_LEVEL_AVX512 || FEWBIT_IN_UNIT(2)

// How many codes a lane holds where x must be laid out alike; 1 where x stays in order.
static int64_t StepsOf(const Job& job) {
  const Choice choice = ChoiceOf(job);
  return choice.few != nullptr ? choice.steps : 1;
}

constexpr int64_t kTall = 384;          // rows of x that share one decoding of the weight
constexpr int64_t kMostColumns = 1024;  // of the weight in a chunk of a few sums

// Long runs of each row, as memory likes it, but two chunks for each thread.
static int64_t ColumnsOf(const Job& job) {
  const int64_t share = (job.outputs() / (2 * job.threads) + 127) / 128 * 128;
  return share < 128 ? 128 : share > kMostColumns ? kMostColumns : share;
}

static int64_t WidthOf(const Job& job, const Choice& choice) {
  if (choice.few != nullptr) return job.contracts_cols ? kFewOutputs : ColumnsOf(job);
  return PanelOutputs(job) < 16 * choice.interleave ? 16 * choice.interleave : PanelOutputs(job);
}

static int64_t ChunksOf(const Job& job) {
  const int64_t width = WidthOf(job, ChoiceOf(job));
  return (job.outputs() + width - 1) / width * ((job.M + kTall - 1) / kTall);
}

// The same job for the rows of x from m on.
static Job FromRow(const Job& job, int64_t m) {
  Job rest = job;
  rest.M -= m, rest.x += m * job.ldx;
  if (job.x_sums != nullptr) rest.x_sums += m * job.ld_sums;
  rest.y = static_cast<char*>(job.y) + m * job.N * (job.y_kind == Float::kF32 ? 4 : 2);
  return rest;
}

// A chunk of a product by panels of `least` contracted elements or more.
static void RunPanels(const Job& job, const Choice& choice, int64_t chunk, int64_t least, decltype(&PanelProduct) product) {
  const int64_t width = WidthOf(job, choice), down = (job.M + kTall - 1) / kTall, m0 = chunk % down * kTall;
  const int64_t length = 16 * choice.steps < least ? least : 16 * choice.steps;
  const int64_t m1 = m0 + kTall < job.M ? m0 + kTall : job.M;
  product(job, choice.fill, length, width, choice.interleave, chunk / down * width, m0, m1);
}

static void RunChunk(const Job& job, int64_t chunk) {
  const Choice choice = ChoiceOf(job);
  if (choice.few == nullptr) return RunPanels(job, choice, chunk, kPart, PanelProduct);
  const int64_t width = WidthOf(job, choice);
  choice.few(job, chunk * width, width);
  if (job.M > choice.rows) RunChunk(FromRow(job, choice.rows), chunk);
}

static bool TakesBfloat16(const Job&) { return false; }

Kernels GetKernels() { return {StepsOf, ChunksOf, RunChunk, TakesBfloat16}; }

#endif
