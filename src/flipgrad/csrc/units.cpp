// Passes over the units of a layer (unit_kernels.inc): entry points, and the split over threads.
#include <algorithm>
#include <cstdint>
#include <new>

#include "buffer.h"
#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

#define FLIPGRAD_WITH_AVX512
#define FLIPGRAD_KERNELS "unit_kernels.inc"
#include "for_each_target.inc"

// Elements in one task: about 10 microseconds of work.
constexpr int64_t kElements = 16384;

using Range = void (*)(const UnitProblem&, int64_t, int64_t, const float*, const float*, const float*, float*);

struct Work {
  const UnitProblem& problem;
  Range range;
  const float *first, *second, *third;
  float* out;
};

void some_units(void* context, int64_t task, int64_t) {
  const Work& work = *static_cast<Work*>(context);
  const UnitProblem& p = work.problem;
  work.range(p, task * kElements, std::min((task + 1) * kElements, p.count), work.first, work.second, work.third, work.out);
}

int pass(const UnitProblem& p, Range range, const float* first, const float* second, const float* third, float* out) {
  Work work{p, range, first, second, third, out};
  try {
    run((p.count + kElements - 1) / kElements, p.threads, some_units, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

struct SpreadWork {
  const SpreadProblem& problem;
  const float *total, *kernel, *share, *x;
  float *spread, *sums;
};

void some_groups(void* context, int64_t task, int64_t thread) {
  const SpreadWork& work = *static_cast<SpreadWork*>(context);
  const SpreadProblem& p = work.problem;
  const int64_t group = task % p.groups, places = p.height * p.width, channels = task * p.in_channels * places;
  const auto spread = FLIPGRAD_BEST(p.portable, spread_group);
  spread(p, work.total + task * p.out_height * p.out_width, work.kernel + group * p.kernel[0] * p.kernel[1],
         work.share + group * p.in_channels, work.x + channels, work.spread + thread * places, work.sums + channels);
}

}  // namespace
}  // namespace flipgrad

int flipgrad_slopes_f32(const UnitProblem* problem, const float* a, const float* grad, float* slopes) {
  using namespace flipgrad;
  return pass(*problem, FLIPGRAD_BEST(problem->portable, slope_range), a, grad, nullptr, slopes);
}

int flipgrad_posterior_f32(const UnitProblem* problem, const float* x, const float* log_odds, const float* ratio, float* mean) {
  using namespace flipgrad;
  return pass(*problem, FLIPGRAD_BEST(problem->portable, posterior_range), x, log_odds, ratio, mean);
}

int flipgrad_certainty_f32(const MomentProblem* problem, const float* log_odds, double* sum) {
  using namespace flipgrad;
  *sum = FLIPGRAD_BEST(problem->portable, certainty)(problem->count, problem->every, log_odds);
  return 0;
}

int flipgrad_join_f32(const UnitProblem* problem, const float* once, const float* twice, const float* x, float* out) {
  using namespace flipgrad;
  return pass(*problem, FLIPGRAD_BEST(problem->portable, join_range), once, twice, x, out);
}

int flipgrad_spread_f32(const SpreadProblem* problem, const float* total, const float* kernel, const float* share, const float* x,
                        float* sums) {
  using namespace flipgrad;
  const SpreadProblem& p = *problem;
  const int64_t tasks = p.batch * p.groups;
  try {
    Buffer<float> spread;
    spread.allocate(thread_limit(p.threads, tasks) * p.height * p.width);
    SpreadWork work{p, total, kernel, share, x, spread.data(), sums};
    run(tasks, p.threads, some_groups, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
