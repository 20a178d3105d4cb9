// Sampling of states, and of slopes given states: entry points, and the split over threads.
#include <algorithm>
#include <cstdint>
#include <new>

#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

#define FLIPGRAD_KERNELS "sample_kernels.inc"
#include "for_each_target.inc"

// Blocks of 32 elements in one task: about 20 microseconds of work for every draw.
constexpr int64_t kBlocksPerTask = 512;

template <class T>
struct Draw {
  const SampleProblem& problem;
  const T* given;
  T* out;
  int64_t blocks;
  void (*range)(const SampleProblem&, int64_t, int64_t, const T*, T*);
};

template <class T>
void draw_some(void* context, int64_t task, int64_t) {
  const Draw<T>& draw = *static_cast<Draw<T>*>(context);
  const int64_t first = task * kBlocksPerTask;
  draw.range(draw.problem, first, std::min(first + kBlocksPerTask, draw.blocks), draw.given, draw.out);
}

template <class T>
int sample(const SampleProblem& p, const T* given, T* out, decltype(Draw<T>::range) portable, decltype(Draw<T>::range) fast) {
  Draw<T> draw{p, given, out, (p.count + 31) / 32, p.portable == 1 || !has_avx2() ? portable : fast};
  try {
    run((draw.blocks + kBlocksPerTask - 1) / kBlocksPerTask, p.threads, draw_some<T>, &draw);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

template <class T>
int sample_logistic(const SampleProblem& p, const T* a, T* out) {
  return sample<T>(p, a, out, portable::draw_range<portable::States<portable::FromLogistic>, T>, fastest::draw_range<fastest::States<fastest::FromLogistic>, T>);
}

template <class T>
int sample_probability(const SampleProblem& p, const T* given, T* out) {
  return sample<T>(p, given, out, portable::draw_range<portable::States<portable::FromProbability>, T>,
                   fastest::draw_range<fastest::States<fastest::FromProbability>, T>);
}

template <bool kPower1>
int mean_slopes(const SampleProblem& p, const float* xa, float* out) {
  return sample<float>(p, xa, out, portable::draw_range<portable::MeanSlopes<kPower1>, float>,
                       fastest::draw_range<fastest::MeanSlopes<kPower1>, float>);
}

}  // namespace
}  // namespace flipgrad

int flipgrad_sample_logistic_f32(const SampleProblem* problem, const float* a, float* states) {
  return flipgrad::sample_logistic(*problem, a, states);
}

int flipgrad_sample_logistic_f64(const SampleProblem* problem, const double* a, double* states) {
  return flipgrad::sample_logistic(*problem, a, states);
}

int flipgrad_sample_probability_f32(const SampleProblem* problem, const float* p, float* states) {
  return flipgrad::sample_probability(*problem, p, states);
}

int flipgrad_sample_probability_f64(const SampleProblem* problem, const double* p, double* states) {
  return flipgrad::sample_probability(*problem, p, states);
}

int flipgrad_mean_slopes_f32(const SampleProblem* problem, const float* xa, float* slopes) {
  return problem->scale == problem->t ? flipgrad::mean_slopes<true>(*problem, xa, slopes)
                                      : flipgrad::mean_slopes<false>(*problem, xa, slopes);
}

void flipgrad_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  flipgrad::portable::UintLanes lanes[4] = {};
  for (int word = 0; word < 4; ++word) lanes[word][0] = counter[word];
  flipgrad::portable::philox(lanes, key[0], key[1]);
  for (int word = 0; word < 4; ++word) out[word] = lanes[word][0];
}
