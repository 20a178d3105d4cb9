// The functions of pre-activations and of weights in the separable flip product: entry points, and the split over threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

constexpr int64_t kMostFeatures = 16;

#define FLIPGRAD_WITH_AVX512
#define FLIPGRAD_KERNELS "feature_kernels.inc"
#include "for_each_target.inc"

// Elements of one image in one task: about 10 microseconds of work.
constexpr int64_t kElements = 8192;

// Numbers of which all or none are looked at for their moments, and such blocks in one task.
constexpr int64_t kBlock = 256, kBlocks = 64;

// Outputs, and inputs, of one task of nodes.
constexpr int64_t kNodeRows = 32, kNodeInputs = 1024;

// How images of `block` elements are split into tasks: several small ones in one, or a large one into several.
struct Split {
  int64_t images, block, together, parts;

  Split(int64_t images, int64_t block)
      : images(images),
        block(block),
        together(std::max<int64_t>(1, kElements / std::max<int64_t>(1, block))),
        parts((block + kElements - 1) / kElements) {}

  int64_t tasks() const { return (images + together - 1) / together * parts; }
};

// Calls `image(number, first, last)` for what is in one task: elements first .. last - 1 of some images.
template <class Image>
void some_images(const Split& split, int64_t task, Image image) {
  const int64_t first = task % split.parts * kElements, last = std::min(first + kElements, split.block);
  const int64_t begin = task / split.parts * split.together, end = std::min(begin + split.together, split.images);
  for (int64_t number = begin; number < end; ++number) image(number, first, last);
}

struct Work {
  const FeatureProblem& problem;
  const Split split;
  const float *a, *grad;
  float *difference, *rest, *curvature;
};

void some_features(void* context, int64_t task, int64_t) {
  const Work& work = *static_cast<Work*>(context);
  const FeatureProblem& p = work.problem;
  const auto range = FLIPGRAD_BEST(p.portable, feature_range);
  const int64_t first_stride = p.leads ? p.block : p.differences * p.block;
  const int64_t rest_stride = p.leads ? (p.differences - 1) * p.block : first_stride;
  some_images(work.split, task, [&](int64_t image, int64_t first, int64_t last) {
    range(p, first, last, work.a + image * p.block, work.grad + image * p.block, work.difference + image * first_stride,
          work.rest + image * rest_stride, work.curvature + image * p.curvatures * p.block);
  });
}

struct LogWork {
  const LogFeatureProblem& problem;
  const Split split;
  const float *a, *states;
  float *difference, *curvature;
};

void some_log_features(void* context, int64_t task, int64_t) {
  const LogWork& work = *static_cast<LogWork*>(context);
  const LogFeatureProblem& p = work.problem;
  const auto range = FLIPGRAD_BEST(p.portable, log_feature_range);
  some_images(work.split, task, [&](int64_t image, int64_t first, int64_t last) {
    range(p, first, last, work.a + image * p.block, work.states + image * p.block,
          work.difference + image * p.differences * p.block, work.curvature + image * p.curvatures * p.block);
  });
}

struct WeightWork {
  const WeightProblem& problem;
  const float* weight;
  float* out;
};

void some_weights(void* context, int64_t task, int64_t) {
  const WeightWork& work = *static_cast<WeightWork*>(context);
  const WeightProblem& p = work.problem;
  const auto range = FLIPGRAD_BEST(p.portable, weight_range);
  range(p, task * kElements, std::min((task + 1) * kElements, p.count), work.weight, work.out);
}

struct MomentWork {
  int64_t count, every;
  const float* numbers;
  int64_t portable;
  // Three of each task.
  double* moments;
};

void some_moments(void* context, int64_t task, int64_t) {
  const MomentWork& work = *static_cast<MomentWork*>(context);
  const auto range = FLIPGRAD_BEST(work.portable, moment_range);
  for (int64_t block = task * kBlocks; block < (task + 1) * kBlocks; ++block) {
    const int64_t first = block * work.every * kBlock;
    if (first >= work.count) break;
    range(first, std::min(first + kBlock, work.count), work.numbers, work.moments + 3 * task);
  }
}

struct NodeWork {
  const NodeProblem& problem;
  const float* weight;
  // Of every output: the moments of its weights, and 1 over its node.
  double* moments;
  const float* inverse;
  float *scaled, *per_input;
  int64_t parts;
};

void some_node_moments(void* context, int64_t task, int64_t) {
  const NodeWork& work = *static_cast<NodeWork*>(context);
  const NodeProblem& p = work.problem;
  const auto range = FLIPGRAD_BEST(p.portable, moment_range);
  for (int64_t row = task * kNodeRows; row < std::min((task + 1) * kNodeRows, p.outputs); ++row) {
    range(row * p.inputs, (row + 1) * p.inputs, work.weight, work.moments + 3 * row);
  }
}

// Some of the inputs of one group, of all its outputs.
void some_scaled(void* context, int64_t task, int64_t) {
  const NodeWork& work = *static_cast<NodeWork*>(context);
  const NodeProblem& p = work.problem;
  const auto range = FLIPGRAD_BEST(p.portable, scaled_range);
  const int64_t group = task / work.parts, first = task % work.parts * kNodeInputs, outputs = p.outputs / p.groups;
  const int64_t count = std::min(kNodeInputs, p.inputs - first);
  float* sums = work.per_input + group * p.inputs + first;
  std::fill(sums, sums + count, 0.0f);
  for (int64_t row = group * outputs; row < (group + 1) * outputs; ++row) {
    const int64_t at = row * p.inputs + first;
    range(count, work.inverse[row], 1.0f / static_cast<float>(outputs), work.weight + at, work.scaled + at, sums);
  }
}

}  // namespace
}  // namespace flipgrad

int flipgrad_nodes_f32(const NodeProblem* problem, const float* weight, float* node, float* scaled, float* per_input) {
  using namespace flipgrad;
  const NodeProblem& p = *problem;
  constexpr double tiny = std::numeric_limits<float>::min();
  try {
    std::vector<double> moments(3 * p.outputs);
    std::vector<float> inverse(p.outputs);
    const int64_t parts = (p.inputs + kNodeInputs - 1) / kNodeInputs;
    NodeWork work{p, weight, moments.data(), inverse.data(), scaled, per_input, parts};
    run((p.outputs + kNodeRows - 1) / kNodeRows, p.threads, some_node_moments, &work);
    double ratios = 0, squares = 0;
    for (int64_t row = 0; row < p.outputs; ++row) {
      ratios += moments[3 * row + 2] / std::max(moments[3 * row + 1] / p.inputs, tiny);
      squares += moments[3 * row + 1];
    }
    const double kurtosis = ratios / std::max(squares, tiny);
    for (int64_t row = 0; row < p.outputs; ++row) {
      const double size = std::sqrt(kurtosis * moments[3 * row + 1] / p.inputs);
      node[row] = static_cast<float>(size);
      // An output without weights adds nothing.
      inverse[row] = static_cast<float>(size > 0 ? 1 / size : 1.0);
    }
    run(p.groups * parts, p.threads, some_scaled, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int flipgrad_features_f32(const FeatureProblem* problem, const float* a, const float* grad, float* difference, float* rest,
                          float* curvature) {
  using namespace flipgrad;
  if (problem->differences > kMostFeatures || problem->curvatures > kMostFeatures) return 2;
  if (!problem->leads) rest = difference + problem->block;
  Work work{*problem, Split(problem->images, problem->block), a, grad, difference, rest, curvature};
  try {
    run(work.split.tasks(), problem->threads, some_features, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int flipgrad_log_features_f32(const LogFeatureProblem* problem, const float* a, const float* states, float* difference,
                              float* curvature) {
  using namespace flipgrad;
  if (problem->differences > kMostFeatures || problem->curvatures > kMostFeatures) return 2;
  LogWork work{*problem, Split(problem->images, problem->block), a, states, difference, curvature};
  try {
    run(work.split.tasks(), problem->threads, some_log_features, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int flipgrad_weights_f32(const WeightProblem* problem, const float* weight, float* out) {
  using namespace flipgrad;
  WeightWork work{*problem, weight, out};
  try {
    run((problem->count + kElements - 1) / kElements, problem->threads, some_weights, &work);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int flipgrad_moments_f32(const MomentProblem* problem, const float* numbers, double* moments) {
  using namespace flipgrad;
  const MomentProblem& p = *problem;
  const int64_t blocks = (p.count + p.every * kBlock - 1) / (p.every * kBlock), tasks = (blocks + kBlocks - 1) / kBlocks;
  try {
    std::vector<double> parts(3 * tasks);
    MomentWork work{p.count, p.every, numbers, p.portable, parts.data()};
    run(tasks, p.threads, some_moments, &work);
    std::fill(moments, moments + 3, 0.0);
    for (int64_t task = 0; task < tasks; ++task) {
      const double* part = parts.data() + 3 * task;
      moments[0] = part[0] <= moments[0] ? moments[0] : part[0];
      moments[1] += part[1];
      moments[2] += part[2];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
