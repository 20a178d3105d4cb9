// What the flips of the units before a Bernoulli likelihood need of its weights: the entry point, and the split over threads.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

#define FLIPGRAD_KERNELS "head_kernels.inc"
#include "for_each_target.inc"

// Weights of one task, about.
constexpr int64_t kWeights = 65536;

struct SquareWork {
  const SquareProblem& problem;
  const float* weight;
  // The copy of the weights, and their squares, if they are wanted.
  float* both;
  int64_t rows;
  // Of every task: the sums of fourth powers [inputs], and three numbers.
  float* fourths;
  double* moments;
};

void some_squares(void* context, int64_t task, int64_t) {
  const SquareWork& work = *static_cast<SquareWork*>(context);
  const SquareProblem& p = work.problem;
  const auto rows = p.portable || !has_avx2() ? portable::square_rows : fastest::square_rows;
  const int64_t first = task * work.rows, at = first * p.inputs;
  float *copy = p.powers ? work.both + at : nullptr, *squares = p.powers ? copy + p.outputs * p.inputs : nullptr;
  rows(std::min(work.rows, p.outputs - first), p.inputs, work.weight + at, copy, squares, work.fourths + task * p.inputs, work.moments + 3 * task);
}

}  // namespace
}  // namespace flipgrad

int flipgrad_squares_f32(const SquareProblem* problem, const float* weight, float* fourths, double* moments, float* both) {
  using namespace flipgrad;
  const SquareProblem& p = *problem;
  const int64_t rows = std::max<int64_t>(1, kWeights / std::max<int64_t>(1, p.inputs)), tasks = (p.outputs + rows - 1) / rows;
  try {
    std::vector<float> parts(tasks * p.inputs);
    std::vector<double> numbers(3 * tasks);
    SquareWork work{p, weight, both, rows, parts.data(), numbers.data()};
    run(tasks, p.threads, some_squares, &work);
    std::fill(moments, moments + 3, 0.0);
    std::fill(fourths, fourths + p.inputs, 0.0f);
    for (int64_t task = 0; task < tasks; ++task) {
      const double* part = numbers.data() + 3 * task;
      moments[0] = std::max(moments[0], part[0]);
      moments[1] += part[1];
      moments[2] += part[2];
      for (int64_t i = 0; i < p.inputs; ++i) fourths[i] += parts[task * p.inputs + i];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
