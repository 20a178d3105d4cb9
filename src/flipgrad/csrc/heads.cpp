// What the flips of the units before a Bernoulli likelihood need of its weights, and flips before a cross-entropy: the entry points,
// and the split over threads.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "buffer.h"
#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

// Weights of a softmax up to which exponentials keep their digits.
constexpr float kLargestSoftmaxWeight = 2;

#define FLIPGRAD_WITH_AVX512
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
  const auto rows = FLIPGRAD_BEST(p.portable, square_rows);
  const int64_t first = task * work.rows, at = first * p.inputs;
  float *copy = p.powers ? work.both + at : nullptr, *squares = p.powers ? copy + p.outputs * p.inputs : nullptr;
  rows(std::min(work.rows, p.outputs - first), p.inputs, work.weight + at, copy, squares, work.fourths + task * p.inputs, work.moments + 3 * task);
}

// Units of one task, and the most floats in the registers that a kernel takes at once.
constexpr int64_t kUnits = 64, kAtOnce = 64;

struct SoftmaxWork {
  const SoftmaxProblem& problem;
  const float *x, *p, *targets, *weight;
  float *up, *down, *excess, *derivative;
  // Of every thread, and of every task whether its weights and units can be taken.
  float* tables;
  int64_t* fine;
};

void some_softmax_units(void* context, int64_t task, int64_t thread) {
  const SoftmaxWork& work = *static_cast<SoftmaxWork*>(context);
  const SoftmaxProblem& p = work.problem;
  const auto units = FLIPGRAD_BEST(p.portable, softmax_units);
  work.fine[task] = units(p, task * kUnits, std::min(kUnits, p.units - task * kUnits), work.x, work.p, work.targets, work.weight, work.up,
                          work.down, work.tables + thread * 3 * kAtOnce * p.outputs, work.excess, work.derivative);
}

struct SoftmaxGradientWork {
  const SoftmaxProblem& problem;
  const float *x, *opposite, *excess, *up, *down, *shares, *aims;
  float* in_weight;
  // Of every thread; and of every task, the sums for the bias.
  float *blocks, *bias, *moved;
};

void some_softmax_gradients(void* context, int64_t task, int64_t thread) {
  const SoftmaxGradientWork& work = *static_cast<SoftmaxGradientWork*>(context);
  const SoftmaxProblem& p = work.problem;
  const auto gradients = FLIPGRAD_BEST(p.portable, softmax_gradients);
  gradients(p, task * kUnits, std::min(kUnits, p.units - task * kUnits), work.x, work.opposite, work.excess, work.up, work.down,
            work.shares, work.aims, work.blocks + thread * 3 * kAtOnce * p.batch, work.in_weight, work.bias + task * p.outputs,
            work.moved + task * p.batch);
}

}  // namespace
}  // namespace flipgrad

int flipgrad_softmax_f32(const SoftmaxProblem* problem, const float* x, const float* logits, const float* targets, const float* weight,
                         float* p, float* grown, float* excess, float* derivative) {
  using namespace flipgrad;
  const SoftmaxProblem& s = *problem;
  const int64_t tasks = (s.units + kUnits - 1) / kUnits;
  try {
    Buffer<float> tables;
    tables.allocate(thread_limit(s.threads, tasks) * 3 * kAtOnce * s.outputs);
    std::vector<int64_t> fine(tasks);
    const auto row = FLIPGRAD_BEST(s.portable, softmax_row);
    for (int64_t image = 0; image < s.batch; ++image) row(s.outputs, logits + image * s.outputs, p + image * s.outputs);
    SoftmaxWork work{s, x, p, targets, weight, grown, grown + s.outputs * s.units, excess, derivative, tables.data(), fine.data()};
    run(tasks, s.threads, some_softmax_units, &work);
    return std::all_of(fine.begin(), fine.end(), [](int64_t one) { return one != 0; }) ? 0 : 2;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int flipgrad_softmax_gradient_f32(const SoftmaxProblem* problem, const float* x, const float* opposite, const float* excess,
                                  const float* grown, const float* p, const float* targets, const float* grad, float* in_weight,
                                  float* in_bias) {
  using namespace flipgrad;
  const SoftmaxProblem& s = *problem;
  const int64_t tasks = (s.units + kUnits - 1) / kUnits;
  try {
    Buffer<float> blocks;
    blocks.allocate(thread_limit(s.threads, tasks) * 3 * kAtOnce * s.batch);
    std::vector<float> shares(s.outputs * s.batch), aims(s.outputs * s.batch), bias(tasks * s.outputs), moved(tasks * s.batch);
    for (int64_t image = 0; image < s.batch; ++image) {
      for (int64_t k = 0; k < s.outputs; ++k) {
        shares[k * s.batch + image] = p[image * s.outputs + k] * grad[image];
        aims[k * s.batch + image] = targets[image * s.outputs + k] * grad[image];
      }
    }
    SoftmaxGradientWork work{s,           x,           opposite,  excess,        grown,       grown + s.outputs * s.units,
                             shares.data(), aims.data(), in_weight, blocks.data(), bias.data(), moved.data()};
    run(tasks, s.threads, some_softmax_gradients, &work);
    for (int64_t task = 1; task < tasks; ++task) {
      for (int64_t image = 0; image < s.batch; ++image) moved[image] += moved[task * s.batch + image];
      for (int64_t k = 0; k < s.outputs; ++k) bias[k] += bias[task * s.outputs + k];
    }
    for (int64_t k = 0; k < s.outputs; ++k) {
      // The mean over the units of what the sample and the flip of each give.
      double sum = 0, flips = bias[k];
      for (int64_t image = 0; image < s.batch; ++image) {
        sum += shares[k * s.batch + image] - aims[k * s.batch + image];
        flips -= shares[k * s.batch + image] * moved[image];
      }
      in_bias[k] = static_cast<float>(sum + flips / s.units);
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

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
