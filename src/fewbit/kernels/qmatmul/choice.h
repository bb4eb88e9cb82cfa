// Which kernel a job takes. Included inside a level's namespace.

struct Choice {
  void (*few)(const Job&, int64_t begin, int64_t count);  // for a few rows of x; null: panels
  Fill fill;                                              // of panels in registers; null: row by row
  int64_t steps, lane_bytes;                              // of the decoder
};

#if FEWBIT_DECODES

static bool IsInteger(const Weight& w) { return w.kind == Codes::kSigned || w.kind == Codes::kUnsigned; }

#endif

#if FEWBIT_LEVEL == FEWBIT_LEVEL_AVX512

template <class Row, class Column, Zero kRole>
static Choice WithRole(const Job& job) {
  static decltype(Choice::few) const dots[] = {FewDots<Row, kRole, 1>, FewDots<Row, kRole, 2>, FewDots<Row, kRole, 3>,
                                               FewDots<Row, kRole, 4>};
  static decltype(Choice::few) const sums[] = {SumColumns<Column, kRole, 1>, SumColumns<Column, kRole, 2>,
                                               SumColumns<Column, kRole, 3>, SumColumns<Column, kRole, 4>};
  const bool is_few = job.M <= kFewRows;
  if (job.contracts_cols) return {is_few ? dots[job.M - 1] : nullptr, FillDots<Row, kRole>, Row::kSteps, Row::kLaneBytes};
  return {is_few ? sums[job.M - 1] : nullptr, FillColumns<Column, kRole>, Column::kSteps, Column::kLaneBytes};
}

// By a decoder of codes along a row, or by one of codes down columns.
template <class Row, class Column = Row>
static Choice With(const Job& job) {
  const Weight& w = job.w;
  // The codes of a lane, or of a byte, must share a scale, and a byte's codes must follow each other along the contraction.
  const int64_t along = job.contracts_cols ? Row::kSteps : Column::kSteps / Column::kLaneBytes;
  const int64_t tile = job.contracts_cols ? w.col_tile : w.row_tile;
  if ((w.bits < 8 && w.packed_cols != job.contracts_cols) || (tile < job.contracted() && tile % along != 0)) {
    return Choice{nullptr, nullptr, 1, 1};
  }
  if (w.role == Zero::kWhole) return WithRole<Row, Column, Zero::kWhole>(job);
  if (w.role == Zero::kOffset) return WithRole<Row, Column, Zero::kOffset>(job);
  return WithRole<Row, Column, Zero::kNone>(job);
}

static Choice ChoiceOf(const Job& job) {
  if (job.w.bits == 1) return With<Narrow<1>>(job);
  if (job.w.bits == 2) return With<Narrow<2>>(job);
  if (job.w.bits == 3) return With<WideRow<3>, WideColumn<3>>(job);
  if (job.w.bits == 4) return With<Narrow<4>>(job);
  if (job.w.bits == 5) return With<WideRow<5>, WideColumn<5>>(job);
  if (job.w.bits == 6) return With<WideRow<6>, WideColumn<6>>(job);
  if (job.w.bits == 7 && IsInteger(job.w)) return With<WideRow<7, Whole<7>>, WideColumn<7, Whole<7>>>(job);
  if (job.w.bits == 8 && job.w.kind == Codes::kSigned) return With<Byte<true>>(job);
  if (job.w.bits == 8 && job.w.kind == Codes::kUnsigned) return With<Byte<false>>(job);
  if (job.w.kind == Codes::kE4M3) return With<Float8<true>>(job);
  if (job.w.kind == Codes::kE5M2) return With<Float8<false>>(job);
  return Choice{nullptr, nullptr, 1, 1};
}

#elif FEWBIT_DECODES

// One row of x has room for its sums in registers; each kernel more is time that the build takes.
template <class Row, class Column, Zero kRole>
static Choice WithRole(const Job& job) {
  if (!job.contracts_cols) {
    return {job.M == 1 ? SumColumns<Column, kRole, 1> : nullptr, FillColumns<Column, kRole>, Column::kSteps, Column::kLaneBytes};
  }
  return {job.M == 1 ? FewDots<Row, kRole, 1> : nullptr, FillDots<Row, kRole>, Row::kSteps, Row::kLaneBytes};
}

template <class Row, class Column = Row>
static Choice With(const Job& job) {
  const Weight& w = job.w;
  const int64_t along = job.contracts_cols ? Row::kSteps : Column::kSteps / Column::kLaneBytes;
  const int64_t tile = job.contracts_cols ? w.col_tile : w.row_tile;
  if ((w.bits < 8 && w.packed_cols != job.contracts_cols) || (tile < job.contracted() && tile % along != 0)) {
    return Choice{nullptr, nullptr, 1, 1};
  }
  if (w.role == Zero::kWhole) return WithRole<Row, Column, Zero::kWhole>(job);
  if (w.role == Zero::kOffset) return WithRole<Row, Column, Zero::kOffset>(job);
  return WithRole<Row, Column, Zero::kNone>(job);
}

static Choice ChoiceOf(const Job& job) {
  if (job.w.bits == 1) return With<Narrow<1>>(job);
  if (job.w.bits == 2) return With<Narrow<2>>(job);
  if (job.w.bits == 3) return With<WideRow<3>, WideColumn<3>>(job);
  if (job.w.bits == 4 && IsInteger(job.w)) return With<Narrow<4, Whole<4>>>(job);
  if (job.w.bits == 4) return With<Narrow<4>>(job);
  if (job.w.bits == 5 && IsInteger(job.w)) return With<WideRow<5, Whole<5>>, WideColumn<5, Whole<5>>>(job);
  if (job.w.bits == 6 && IsInteger(job.w)) return With<WideRow<6, Whole<6>>, WideColumn<6, Whole<6>>>(job);
  if (job.w.bits == 7 && IsInteger(job.w)) return With<WideRow<7, Whole<7>>, WideColumn<7, Whole<7>>>(job);
  if (job.w.bits == 8 && IsInteger(job.w)) return With<Narrow<8, Whole<8>>>(job);
  if (job.w.bits == 6) return With<WideRow<6>, WideColumn<6>>(job);
  if (job.w.kind == Codes::kE4M3) return With<Float8<true>>(job);
  if (job.w.kind == Codes::kE5M2) return With<Float8<false>>(job);
  return Choice{nullptr, nullptr, 1, 1};
}

#else

static Choice ChoiceOf(const Job&) { return Choice{nullptr, nullptr, 1, 1}; }

#endif

// How many codes a lane holds where x must be laid out alike; 1 where x stays in order.
static int64_t StepsOf(const Job& job) {
  const Choice choice = ChoiceOf(job);
  return job.contracts_cols && choice.few != nullptr ? choice.steps : 1;
}

constexpr int64_t kTall = 384;        // rows of x that share one decoding of the weight
constexpr int64_t kFewColumns = 512;  // its columns in a chunk of a few sums

static int64_t WidthOf(const Job& job, bool few) {
  return !few ? PanelOutputs(job) : job.contracts_cols ? kFewOutputs : kFewColumns;
}

static int64_t ChunksOf(const Job& job) {
  const int64_t width = WidthOf(job, ChoiceOf(job).few != nullptr);
  return (job.outputs() + width - 1) / width * ((job.M + kTall - 1) / kTall);
}

static void RunChunk(const Job& job, int64_t chunk) {
  const Choice choice = ChoiceOf(job);
  const int64_t width = WidthOf(job, choice.few != nullptr), down = (job.M + kTall - 1) / kTall, m0 = chunk % down * kTall;
  if (choice.few != nullptr) return choice.few(job, chunk * width, width);
  const int64_t apart = choice.fill != nullptr && !job.contracts_cols ? choice.lane_bytes : 1;
  const int64_t block = choice.fill != nullptr && job.contracts_cols ? 16 * choice.steps : kPart;
  PanelProduct(job, choice.fill, block < kPart ? kPart : block, apart, chunk / down * width, m0, m0 + kTall < job.M ? m0 + kTall : job.M);
}
