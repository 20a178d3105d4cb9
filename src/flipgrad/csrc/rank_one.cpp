// Flips of rank one, logistic noise: what they need of the pre-activations, by images on all threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

// Steps, in scales: up to the first one series give all digits of a log ratio, up to the other one a product does not overflow.
constexpr double kSeriesStep = 0.25, kModerateStep = 20;

#define FLIPGRAD_WITH_AVX512
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
  const auto of_logs = FLIPGRAD_BEST(p.portable, log_channel);
  const auto of_cdf = FLIPGRAD_BEST(p.portable, flip_channel);
  const int64_t channels = p.channels / p.groups, first = task * channels;
  float* spread = work.spread + task * p.block;
  std::fill(spread, spread + p.block, 0.0f);
  for (int64_t row = first; row < first + channels; ++row) {
    const int64_t at = row * p.block;
    const float step = work.steps[row % p.channels];
    if (p.of_logs) {
      of_logs(p, step, work.a + at, work.given + at, work.odd + at, spread);
    } else {
      of_cdf(p, step, work.a + at, work.given + at, work.sums + at, work.odd + at, p.keep_even ? work.even + at : nullptr, spread,
             work.rows + 3 * row);
    }
  }
}

struct ImageWork {
  const RankOneProblem& problem;
  const float *tables, *a, *grad, *sums;
  float *odd, *even, *spread, *rows;
};

// Images in one task: several of those with few places.
int64_t images_together(const RankOneProblem& p) { return std::max<int64_t>(1, 16 / std::max<int64_t>(1, p.block)); }

void some_images(void* context, int64_t task, int64_t) {
  const ImageWork& work = *static_cast<ImageWork*>(context);
  const RankOneProblem& p = work.problem;
  const auto image = FLIPGRAD_BEST(p.portable, flip_image);
  const int64_t together = images_together(p);
  for (int64_t n = task * together; n < std::min((task + 1) * together, p.images); ++n) {
    const int64_t at = n * p.block * p.channels;
    image(p, work.tables, work.a + at, work.grad + at, work.sums + at, work.odd + at, p.keep_even ? work.even + at : nullptr,
          work.spread + n * p.block, work.rows + 3 * n * p.channels);
  }
}

// Rows in one task of those with one place.
constexpr int64_t kRows = 16;

struct RowWork {
  const RankOneProblem& problem;
  const float *tables, *a, *states;
  float *odd, *spread;
  bool some, all_small;
};

void some_rows(void* context, int64_t task, int64_t) {
  const RowWork& work = *static_cast<RowWork*>(context);
  const RankOneProblem& p = work.problem;
  const auto row = FLIPGRAD_BEST(p.portable, log_row);
  for (int64_t image = task * kRows; image < std::min((task + 1) * kRows, p.images); ++image) {
    const int64_t at = image * p.channels;
    work.spread[image] = row(p, work.tables, work.some, work.all_small, work.a + at, work.states + at, work.odd + at);
  }
}

}  // namespace
}  // namespace flipgrad

int flipgrad_log_rows_f32(const RankOneProblem* problem, const float* a, const float* states, const float* steps, float* odd,
                          float* spread) {
  using namespace flipgrad;
  const RankOneProblem& p = *problem;
  try {
    std::vector<float> tables(5 * p.channels);
    bool some = false, all_small = true;
    for (int64_t channel = 0; channel < p.channels; ++channel) {
      const double step = steps[channel], s = std::fabs(step) / p.scale;
      if (!(s <= kModerateStep)) return 2;
      some |= s <= kSeriesStep;
      all_small &= s <= kSeriesStep;
      float* table = tables.data() + channel;
      table[0] = static_cast<float>(s);
      table[p.channels] = static_cast<float>(std::tanh(s / 2));
      table[2 * p.channels] = static_cast<float>(std::exp(-s));
      table[3 * p.channels] = static_cast<float>(std::pow(std::sinh(s / 2), 2));
      table[4 * p.channels] = step < 0 ? -1.0f : 1.0f;
    }
    RowWork work{p, tables.data(), a, states, odd, spread, some, all_small};
    run((p.images + kRows - 1) / kRows, p.threads, some_rows, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int flipgrad_flip_rows_f32(const RankOneProblem* problem, const float* a, const float* grad, const float* sums, const float* steps,
                           float* odd, float* even, float* spread, float* rows) {
  using namespace flipgrad;
  const RankOneProblem& p = *problem;
  try {
    std::vector<float> tables(4 * p.channels);
    for (int64_t channel = 0; channel < p.channels; ++channel) {
      const portable::FlipStep step(steps[channel], p.scale);
      float* table = tables.data() + channel;
      table[0] = step.size;
      table[p.channels] = step.decay;
      table[2 * p.channels] = step.factor;
      table[3 * p.channels] = step.half;
    }
    ImageWork work{p, tables.data(), a, grad, sums, odd, even, spread, rows};
    const int64_t together = images_together(p);
    run((p.images + together - 1) / together, p.threads, some_images, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

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
