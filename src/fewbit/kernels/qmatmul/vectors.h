// One row of x, or a few: the weight is decoded in registers. Included inside a level's namespace.

static void Run(xla::ffi::ThreadPool& pool, const Job& job) {
  constexpr int64_t kTall = 384;  // rows of x that share one decoding of the weight
  const int64_t width = PanelOutputs(job), across = (job.outputs() + width - 1) / width, down = (job.M + kTall - 1) / kTall;
  ParallelFor(pool, across * down, [&](int64_t chunk) {
    const int64_t m0 = chunk % down * kTall, m1 = m0 + kTall < job.M ? m0 + kTall : job.M;
    PanelProduct(job, chunk / down * width, m0, m1);
  });
}
