// The C interface of flipgrad's kernels. Python fills the structures through ctypes (flipgrad/native): keep both alike.
#pragma once

#include <cstdint>

extern "C" {

// A convolution and where its tensors lie. All strides count elements; tensors are [batch or out, channel, row, column].
// A fully connected layer is a convolution of one place.
struct FlipProblem {
  int64_t batch, groups;
  // Channels of one group.
  int64_t in_channels, out_channels;
  int64_t height, width, out_height, out_width;
  int64_t kernel[2], stride[2], padding[2], dilation[2];
  int64_t x_strides[4], a_strides[4], grad_strides[4], weight_strides[4], u_strides[4];
  // The largest absolute value among the weights.
  double largest_weight;
  double scale;
  int64_t threads;
  // 1: only the instructions that every processor of this architecture has; 2: at most AVX2; 0: the best ones.
  int64_t portable;
};

// Counter-based sampling for `count` units: the random number of unit i in the draw (seed, offset) is always the same.
struct SampleProblem {
  int64_t count;
  uint64_t seed, offset;
  double scale;
  int64_t threads;
  int64_t portable;
  // For mean slopes: the number of draws, whose offsets follow one another, and the temperature.
  int64_t draws;
  double t;
};

// A pass over `count` units or pre-activations; the scale is of the noise, where there is one.
struct UnitProblem {
  int64_t count;
  double scale;
  int64_t threads;
  int64_t portable;
};

// Sums at the places of a convolution's output, one for every group, spread over its inputs: by a kernel [groups, kernel] and with a
// share for every input channel [groups, channels]. `of_ratio`: how they are joined to other sums, see unit_kernels.inc. With
// `channels_last`, which is for one group, the channels of a place lie next to each other.
struct SpreadProblem {
  int64_t batch, groups;
  // Channels of one group.
  int64_t in_channels;
  int64_t height, width, out_height, out_width;
  int64_t kernel[2], stride[2], padding[2], dilation[2];
  int64_t of_ratio, channels_last;
  int64_t threads;
  int64_t portable;
};

// The functions of the pre-activations in the separable flip product, for images of `block` elements each: those of `differences`
// nodes s, given by cosh(s), are written one after the other for every image, and those of the curvature part likewise. With
// `leads`, one for every node after the first, those differences are less so many times the first one, and apart from it.
struct FeatureProblem {
  int64_t images, block, differences, curvatures;
  const float *cosh_steps, *leads;
  // Which of the difference nodes the curvature functions belong to.
  const int64_t* curvature_nodes;
  double scale;
  int64_t threads;
  int64_t portable;
};

// The functions of the pre-activations in the separable log ratio, like FeatureProblem: the values at the nodes of the part that
// is odd in the weight, the differences, and of the curvatures, each set multiplied by a square matrix (row: node).
struct LogFeatureProblem {
  int64_t images, block, differences, curvatures;
  // Of the difference part's nodes s: s / 2 and tanh(s / 2).
  const float *half_steps, *half_tanhs;
  // Of the curvature part's: (cosh s - 1) / 2.
  const float* heights;
  const float *difference_matrix, *curvature_matrix;
  double scale;
  int64_t threads;
  int64_t portable;
};

// The functions of `count` weights w in the separable flip product: polynomials in 2 (w / limit)^2 - 1 with `terms` coefficients
// each, lowest power first; the first `odd_powers` of them times w, the others times w^2.
struct WeightProblem {
  int64_t count, functions, odd_powers, terms;
  const float* coefficients;
  double limit;
  int64_t threads;
  int64_t portable;
};

// The separable flip product of a fully connected layer with weights [out, in]: `differences` functions of the weights as in
// WeightProblem are multiplied by w, then `curvatures` of them by w^2.
struct ProductProblem {
  int64_t batch, in, out, differences, curvatures, terms;
  const float* coefficients;
  double limit;
  int64_t threads;
  int64_t portable;
};

// The moments of `count` numbers, or of some of them: of the first of every `every` blocks of 256.
struct MomentProblem {
  int64_t count, every;
  int64_t threads;
  int64_t portable;
};

// What flips of rank one need of pre-activations [images, channels, block], with a step for every channel: E [images, channels,
// block] and the sums of O over the channels of every group, [images, groups, block]. `of_logs`: those of the log ratio of states;
// else, times a gradient, those of the cdf, and for every image and channel the sums of O, of the slopes 2F' and of these times
// other numbers, [images, channels, 3]. `keep_even`: O itself too.
struct RankOneProblem {
  int64_t images, channels, groups, block, of_logs, keep_even;
  double scale;
  int64_t threads;
  int64_t portable;
};

// The nodes of a log ratio by one product (flips/one_product.py) of weights [outputs, inputs]: one for every output; the weights
// over these; and the mean of the squares of that over the outputs of every group, [groups, inputs].
struct NodeProblem {
  int64_t outputs, inputs, groups;
  int64_t threads;
  int64_t portable;
};

// A log ratio by one product of a fully connected layer with weights [outputs, inputs].
struct OneProductProblem {
  int64_t batch, inputs, outputs;
  double scale;
  int64_t threads;
  int64_t portable;
};

// Flips of units [batch, units] before a cross-entropy of so many outputs.
struct SoftmaxProblem {
  int64_t batch, units, outputs;
  int64_t threads;
  int64_t portable;
};

// Of weights [outputs, inputs]; `powers` is whether these and their squares are wanted.
struct SquareProblem {
  int64_t outputs, inputs, powers;
  int64_t threads;
  int64_t portable;
};

// All return 0, or 1 when memory ran out; the flip products also 2 when weights are too large for the kernels.
int flipgrad_flip_f32(const FlipProblem* problem, const float* x, const float* a, const float* grad, const float* weight, float* u);
int flipgrad_flip_f64(const FlipProblem* problem, const double* x, const double* a, const double* grad, const double* weight, double* u);

// The logarithm of how much more likely the output states y are with one unit of x flipped. In the problem, y is called grad,
// and the result u; weights may be of any size.
int flipgrad_ratio_f32(const FlipProblem* problem, const float* x, const float* a, const float* y, const float* weight,
                       float* log_ratio);
int flipgrad_ratio_f64(const FlipProblem* problem, const double* x, const double* a, const double* y, const double* weight,
                       double* log_ratio);

// 2F'(a) grad, F the sigmoid of a / scale.
int flipgrad_slopes_f32(const UnitProblem* problem, const float* a, const float* grad, float* slopes);
// The posterior means of units: x tanh((x log_odds - ratio) / 2).
int flipgrad_posterior_f32(const UnitProblem* problem, const float* x, const float* log_odds, const float* ratio, float* mean);
// The sum of the squared means of units with these log-odds, of each `every`-th.
int flipgrad_certainty_f32(const MomentProblem* problem, const float* log_odds, double* sum);
// x (once + x twice), which may be written over `once` or `twice`.
int flipgrad_join_f32(const UnitProblem* problem, const float* once, const float* twice, const float* x, float* out);
// What is spread over the inputs is joined to their `sums`, in place.
int flipgrad_spread_f32(const SpreadProblem* problem, const float* total, const float* kernel, const float* share, const float* x,
                        float* sums);

// The differences after the first go to `rest` with leads, else behind it.
int flipgrad_features_f32(const FeatureProblem* problem, const float* a, const float* grad, float* difference, float* rest,
                          float* curvature);
int flipgrad_log_features_f32(const LogFeatureProblem* problem, const float* a, const float* states, float* difference,
                              float* curvature);
// The largest square, the sum of squares and the sum of fourth powers.
int flipgrad_moments_f32(const MomentProblem* problem, const float* numbers, double* moments);
int flipgrad_weights_f32(const WeightProblem* problem, const float* weight, float* out);
// u [batch, in] = x (x difference v + curvature q), v and q the functions of the weights, difference [batch, differences out] and
// curvature [batch, curvatures out] those of the pre-activations; all without gaps.
int flipgrad_product_f32(const ProductProblem* problem, const float* difference, const float* curvature, const float* weight, const float* x,
                         float* u);

// `given` is the gradient, and `sums` the other numbers; or the states, and then only `odd` and `spread` are written.
int flipgrad_rank_one_f32(const RankOneProblem* problem, const float* a, const float* given, const float* sums, const float* steps,
                          float* odd, float* even, float* spread, float* rows);
// Those of the cdf where the channels of a place lie next to each other, a [images, block, channels], in one group: the sums of O over
// channels are [images, block], the other sums [images, 3, channels].
int flipgrad_flip_rows_f32(const RankOneProblem* problem, const float* a, const float* grad, const float* sums, const float* steps,
                           float* odd, float* even, float* spread, float* rows);
// Those of a log ratio where images have one place, [images, channels], in one group: the sums of O are [images]. Returns 2 where
// a step is too large.
int flipgrad_log_rows_f32(const RankOneProblem* problem, const float* a, const float* states, const float* steps, float* odd,
                          float* spread);
int flipgrad_nodes_f32(const NodeProblem* problem, const float* weight, float* node, float* scaled, float* per_input);
// The log ratio [batch, inputs] of states x [batch, inputs], given the pre-activations and the output states [batch, outputs];
// all without gaps. Returns 2 where a step is too large.
int flipgrad_one_product_f32(const OneProductProblem* problem, const float* weight, const float* a, const float* states, const float* x,
                             float* log_ratio);

// With targets [batch, outputs] and weight [outputs, units]: the softmax `p` of the logits; exp(-2w) - 1 and exp(2w) - 1 of the
// weights, `grown` [2, outputs, units]; what the sum of exponentials is above 1 after every flip, and the discrete derivative, both
// [batch, units]. Returns 2 where a weight is above 2, or no number, or a unit is 0.
int flipgrad_softmax_f32(const SoftmaxProblem* problem, const float* x, const float* logits, const float* targets, const float* weight,
                         float* p, float* grown, float* excess, float* derivative);
// From these the averaged gradients in weight and bias, for those in the losses, `grad` [batch], and the probabilities of the
// opposite states [batch, units].
int flipgrad_softmax_gradient_f32(const SoftmaxProblem* problem, const float* x, const float* opposite, const float* excess,
                                  const float* grown, const float* p, const float* targets, const float* grad, float* in_weight,
                                  float* in_bias);

// The sums of fourth powers over the outputs, [inputs]; of all squares the largest, which no NaN is, the sum and the sum of cubes; and, if
// they are wanted, a copy of the weights and their squares, [2, outputs, inputs].
int flipgrad_squares_f32(const SquareProblem* problem, const float* weight, float* fourths, double* moments, float* both);

// States +1 where a uniform number is below F(a / scale), F the sigmoid, else -1.
int flipgrad_sample_logistic_f32(const SampleProblem* problem, const float* a, float* states);
int flipgrad_sample_logistic_f64(const SampleProblem* problem, const double* a, double* states);
// The same for given probabilities.
int flipgrad_sample_probability_f32(const SampleProblem* problem, const float* p, float* states);
int flipgrad_sample_probability_f64(const SampleProblem* problem, const double* p, double* states);

// For given x a, x states and Z logistic noise of that scale: the mean over draws of Z with sign(a - Z) = x of the slope in a of
// tanh((a - Z) / 2t).
int flipgrad_mean_slopes_f32(const SampleProblem* problem, const float* xa, float* slopes);

// One block of Philox-4x32-10, for its known answers.
void flipgrad_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out);

// 1 if the kernels for AVX2 and FMA run here, or those for AVX-512.
int flipgrad_has_avx2(void);
int flipgrad_has_avx512(void);

// 1 if flipgrad_product_f32 is faster than other libraries' products: they may use AVX-512 where it does not.
int flipgrad_has_fast_products(void);
}
