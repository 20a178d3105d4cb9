// Flips of rank one, logistic noise: what they need of the pre-activations, by images on all threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>

#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

// Steps, in scales: up to the first one series give all digits of a log ratio, up to the other one a product does not overflow.
constexpr double kSeriesStep = 0.25, kModerateStep = 20;

#define FLIPGRAD_KERNELS "rank_one_kernels.inc"
#include "for_each_target.inc"

struct Work {
  const RankOneProblem& problem;
  const float *a, *given, *sums, *steps;
  float *odd, *even, *spread, *rows;
};

// The channels of one group of one image.
void some_channels(void* context, int64_t task, int64_t) {
  const Work& work = *static_cast<Work*>(context);
  const RankOneProblem& p = work.problem;
  const bool portable = p.portable || !has_avx2();
  const int64_t channels = p.channels / p.groups, first = task * channels;
  float* spread = work.spread + task * p.block;
  std::fill(spread, spread + p.block, 0.0f);
  for (int64_t row = first; row < first + channels; ++row) {
    const int64_t at = row * p.block;
    const float step = work.steps[row % p.channels];
    if (p.of_logs) {
      (portable ? portable::log_channel : fastest::log_channel)(p, step, work.a + at, work.given + at, work.odd + at, spread);
    } else {
      (portable ? portable::flip_channel : fastest::flip_channel)(p, step, work.a + at, work.given + at, work.sums + at,
                                                                  work.odd + at, p.keep_even ? work.even + at : nullptr, spread,
                                                                  work.rows + 3 * row);
    }
  }
}

}  // namespace
}  // namespace flipgrad

int flipgrad_rank_one_f32(const RankOneProblem* problem, const float* a, const float* given, const float* sums, const float* steps,
                          float* odd, float* even, float* spread, float* rows) {
  using namespace flipgrad;
  Work work{*problem, a, given, sums, steps, odd, even, spread, rows};
  try {
    run(problem->images * problem->groups, problem->threads, some_channels, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
