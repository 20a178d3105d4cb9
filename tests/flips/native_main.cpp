// Runs every kernel over odd shapes and compares it with the definition: `make sanitize` builds this with sanitizers, which
// watch every byte that the kernels touch.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "flipgrad.h"

// Of packed networks, in tests/packed/native_packed.cpp.
int packed_failures();

namespace {

std::mt19937 engine(1);

template <class T>
using Memory = std::unique_ptr<T[]>;

// Exactly as large as needed: a sanitizer sees the first byte beyond.
template <class T>
Memory<T> numbers(int64_t count, double scale) {
  std::normal_distribution<double> normal(0, scale);
  Memory<T> memory(new T[count]);
  for (int64_t i = 0; i < count; ++i) memory[i] = static_cast<T>(normal(engine));
  return memory;
}

double sigmoid(double a) { return 1 / (1 + std::exp(-a)); }

void contiguous(int64_t* strides, int64_t channels, int64_t height, int64_t width) {
  strides[0] = channels * height * width;
  strides[1] = height * width;
  strides[2] = width;
  strides[3] = 1;
}

struct Shape {
  int64_t batch, groups, in, out, height, width, kernel[2], stride[2], padding[2], dilation[2];
};

FlipProblem problem_of(const Shape& s, double scale, double largest) {
  FlipProblem p{};
  p.batch = s.batch;
  p.groups = s.groups;
  p.in_channels = s.in;
  p.out_channels = s.out;
  p.height = s.height;
  p.width = s.width;
  for (int axis = 0; axis < 2; ++axis) {
    p.kernel[axis] = s.kernel[axis];
    p.stride[axis] = s.stride[axis];
    p.padding[axis] = s.padding[axis];
    p.dilation[axis] = s.dilation[axis];
  }
  p.out_height = (s.height + 2 * s.padding[0] - s.dilation[0] * (s.kernel[0] - 1) - 1) / s.stride[0] + 1;
  p.out_width = (s.width + 2 * s.padding[1] - s.dilation[1] * (s.kernel[1] - 1) - 1) / s.stride[1] + 1;
  contiguous(p.x_strides, s.groups * s.in, s.height, s.width);
  contiguous(p.u_strides, s.groups * s.in, s.height, s.width);
  contiguous(p.a_strides, s.groups * s.out, p.out_height, p.out_width);
  contiguous(p.grad_strides, s.groups * s.out, p.out_height, p.out_width);
  contiguous(p.weight_strides, s.in, s.kernel[0], s.kernel[1]);
  p.largest_weight = largest;
  p.scale = scale;
  return p;
}

// log of the sigmoid.
double log_sigmoid(double a) { return std::min(a, 0.0) - std::log1p(std::exp(-std::fabs(a))); }

// The terms of the flip product and of the log ratio, for a state, an output's pre-activation before and after its flip, and
// the gradient or the output's state.
double flip_term(double x, double before, double after, double grad) { return x * (sigmoid(before) - sigmoid(after)) * grad; }

double ratio_term(double x, double before, double after, double y) {
  return x == 0 ? 0 : log_sigmoid(y * after) - log_sigmoid(y * before);
}

// The definition, one term at a time.
template <class T, class Term>
std::vector<double> expected(const FlipProblem& p, const T* x, const T* a, const T* grad, const T* weight, Term term) {
  std::vector<double> u(p.batch * p.groups * p.in_channels * p.height * p.width);
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t j = 0; j < p.groups * p.out_channels; ++j)
      for (int64_t row = 0; row < p.out_height; ++row)
        for (int64_t column = 0; column < p.out_width; ++column)
          for (int64_t i = 0; i < p.in_channels; ++i)
            for (int64_t ky = 0; ky < p.kernel[0]; ++ky)
              for (int64_t kx = 0; kx < p.kernel[1]; ++kx) {
                const int64_t y = row * p.stride[0] + ky * p.dilation[0] - p.padding[0];
                const int64_t z = column * p.stride[1] + kx * p.dilation[1] - p.padding[1];
                if (y < 0 || y >= p.height || z < 0 || z >= p.width) continue;
                const int64_t channel = j / p.out_channels * p.in_channels + i;
                const int64_t in = ((n * p.groups * p.in_channels + channel) * p.height + y) * p.width + z;
                const int64_t out = ((n * p.groups * p.out_channels + j) * p.out_height + row) * p.out_width + column;
                const double w = weight[((j * p.in_channels + i) * p.kernel[0] + ky) * p.kernel[1] + kx];
                const double before = a[out] / p.scale, after = (a[out] - 2 * w * x[in]) / p.scale;
                u[in] += term(x[in], before, after, grad[out]);
              }
  return u;
}

template <class T>
using Sum = int (*)(const FlipProblem*, const T*, const T*, const T*, const T*, T*);

// One of the sums over flips; `binary`: what it is given for every output is a state.
template <class T, class Term>
bool sums_right(Sum<T> sum, Term term, bool binary, const Shape& shape, double size, double tolerance) {
  FlipProblem p = problem_of(shape, 1.5, 6 * size);
  const int64_t in = p.batch * p.groups * p.in_channels * p.height * p.width;
  const int64_t out = p.batch * p.groups * p.out_channels * p.out_height * p.out_width;
  const int64_t weights = p.groups * p.out_channels * p.in_channels * p.kernel[0] * p.kernel[1];
  const Memory<T> x = numbers<T>(in, 1), a = numbers<T>(out, 3), given = numbers<T>(out, 1), w = numbers<T>(weights, size);
  for (int64_t i = 0; i < in; ++i) x[i] = i % 11 == 3 ? T(0) : std::copysign(T(1), x[i]);
  for (int64_t j = 0; binary && j < out; ++j) given[j] = j % 13 == 5 ? T(0) : std::copysign(T(1), given[j]);
  const std::vector<double> right = expected(p, x.get(), a.get(), given.get(), w.get(), term);
  bool good = true;
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      p.threads = threads;
      p.portable = portable;
      Memory<T> u = numbers<T>(in, 1e30);
      good = good && sum(&p, x.get(), a.get(), given.get(), w.get(), u.get()) == 0;
      double error = 0, norm = 0;
      for (int64_t i = 0; i < in; ++i) {
        error += (u[i] - right[i]) * (u[i] - right[i]);
        norm += right[i] * right[i];
      }
      // The second part is the rounding of the reference, and of products of numbers near 1.
      good = good && std::sqrt(error) <= tolerance * std::sqrt(norm) + (binary ? tolerance * std::sqrt(in) : 1e-14 * out);
    }
  }
  return good;
}

template <class T, class Sample>
bool samples_right(Sample sample, int64_t count) {
  const Memory<T> given = numbers<T>(count, 0.3);
  std::vector<T> first;
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const SampleProblem p{count, 7, 11, 1.0, threads, portable, 1, 1.0};
      Memory<T> states = numbers<T>(count, 1e30);
      if (sample(&p, given.get(), states.get()) != 0) return false;
      for (int64_t i = 0; i < count; ++i) {
        if (std::fabs(states[i]) != 1) return false;
        if (!first.empty() && static_cast<int64_t>(first.size()) == count && portable == 0 && states[i] != first[i]) return false;
      }
      if (first.empty()) first.assign(states.get(), states.get() + count);
    }
  }
  return true;
}

bool close(double actual, double right) { return std::fabs(actual - right) <= 1e-5 * std::fabs(right) + 1e-30; }

// Mean slopes of two draws, given x a, from the random numbers of Philox.
bool slopes_right(int64_t count, double scale, double t) {
  const Memory<float> xa = numbers<float>(count, 10);
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const SampleProblem p{count, 7, 11, scale, threads, portable, 2, t};
      Memory<float> slopes = numbers<float>(count, 1e30);
      if (flipgrad_mean_slopes_f32(&p, xa.get(), slopes.get()) != 0) return false;
      for (int64_t i = 0; i < count; ++i) {
        double right = 0;
        for (uint32_t offset : {11u, 12u}) {
          const uint32_t counter[] = {static_cast<uint32_t>(i / 32 * 8 + i % 8), 0, offset, 0}, key[] = {7, 0};
          uint32_t words[4];
          flipgrad_philox(counter, key, words);
          const double u = ((words[i % 32 / 8] >> 1) + 0.5) / 2147483648.0;
          // exp(Z / scale) where the cdf of Z is u F(xa), and then exp((Z - xa) / t).
          const double q = u * sigmoid(xa[i] / scale), r = std::pow(q / (1 - q), scale / t) * std::exp(-xa[i] / t);
          right += r / ((1 + r) * (1 + r)) / t;
        }
        if (!close(slopes[i], right)) return false;
      }
    }
  }
  return true;
}

// The functions of pre-activations in the separable form, at two nodes, of which the second has a curvature too.
bool features_right(int64_t images, int64_t block) {
  const float cosh_steps[] = {1.02, 3.7};
  const int64_t curvature_nodes[] = {1};
  const int64_t count = images * block;
  const Memory<float> a = numbers<float>(count, 20), grad = numbers<float>(count, 1);
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      FeatureProblem p{images, block, 2, 1, cosh_steps, nullptr, curvature_nodes, 1.5, threads, portable};
      Memory<float> difference = numbers<float>(2 * count, 1e30), curvature = numbers<float>(count, 1e30);
      if (flipgrad_features_f32(&p, a.get(), grad.get(), difference.get(), nullptr, curvature.get()) != 0) return false;
      const float leads[] = {0.5};
      p.leads = leads;
      Memory<float> first = numbers<float>(count, 1e30), rest = numbers<float>(count, 1e30);
      if (flipgrad_features_f32(&p, a.get(), grad.get(), first.get(), rest.get(), curvature.get()) != 0) return false;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = i / block * 2 * block + i % block;
        if (!close(first[i], difference[at])) return false;
        const float left = difference[at + block] - 0.5f * difference[at];
        if (std::fabs(rest[i] - left) > 1e-6 * std::fabs(difference[at]) + 1e-30) return false;
      }
      for (int64_t i = 0; i < count; ++i) {
        const double t = a[i] / 1.5;
        for (int64_t r = 0; r < 2; ++r) {
          const int64_t at = (i / block * 2 + r) * block + i % block;
          const double right = grad[i] / (std::cosh(t) + cosh_steps[r]);
          if (!close(difference[at], right)) return false;
          // The mean cancels near 0, where it is small beside the difference function.
          if (r == 1 && std::fabs(curvature[i] + std::tanh(t / 2) * right) > 1e-5 * std::fabs(right) + 1e-30) return false;
        }
      }
    }
  }
  return true;
}

// Those of the log ratio, at one node of the difference part and two of the curvature one, which are swapped by their matrix.
bool log_features_right(int64_t images, int64_t block) {
  const double step = 0.8, heights[] = {0.01, 0.4};
  const float half_steps[] = {0.4f}, half_tanhs[] = {static_cast<float>(std::tanh(step / 2))}, float_heights[] = {0.01f, 0.4f};
  const float difference_matrix[] = {2}, curvature_matrix[] = {0, 1, 1, 0};
  const int64_t count = images * block;
  const Memory<float> a = numbers<float>(count, 20);
  Memory<float> states = numbers<float>(count, 1);
  for (int64_t i = 0; i < count; ++i) states[i] = states[i] < 0 ? -1 : 1;
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const LogFeatureProblem p{images,     block,      1,           2,   half_steps, half_tanhs,
                                float_heights, difference_matrix, curvature_matrix, 1.5, threads,    portable};
      Memory<float> difference = numbers<float>(count, 1e30), curvature = numbers<float>(2 * count, 1e30);
      if (flipgrad_log_features_f32(&p, a.get(), states.get(), difference.get(), curvature.get()) != 0) return false;
      for (int64_t i = 0; i < count; ++i) {
        const double m = std::tanh(a[i] / 3), right = 2 * (std::atanh(m * std::tanh(step / 2)) - states[i] * step / 2);
        if (std::fabs(difference[i] - right) > 1e-5) return false;
        for (int64_t k = 0; k < 2; ++k) {
          const double part = -std::log1p((1 - m * m) * heights[1 - k]) / 2;
          if (std::fabs(curvature[(i / block * 2 + k) * block + i % block] - part) > 1e-6) return false;
        }
      }
    }
  }
  return true;
}

// Passes over units, far ones among them.
bool units_right(int64_t count) {
  const Memory<float> a = numbers<float>(count, 20), grad = numbers<float>(count, 1), ratio = numbers<float>(count, 5);
  Memory<float> x = numbers<float>(count, 1);
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] < -1 ? 0.0f : x[i] < 0 ? -1.0f : 1.0f;
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const UnitProblem p{count, 1.5, threads, portable};
      double certainty = -1, squares = 0;
      const MomentProblem some{count, 3, threads, portable};
      for (int64_t i = 0; i < count; i += 3) squares += std::pow(std::tanh(double{a[i]} / 2), 2);
      if (flipgrad_certainty_f32(&some, a.get(), &certainty) != 0 || std::fabs(certainty - squares) > 1e-5 * squares) return false;
      Memory<float> slopes = numbers<float>(count, 1e30), mean = numbers<float>(count, 1e30), sums = numbers<float>(count, 1e30);
      if (flipgrad_slopes_f32(&p, a.get(), grad.get(), slopes.get()) != 0) return false;
      if (flipgrad_posterior_f32(&p, x.get(), a.get(), ratio.get(), mean.get()) != 0) return false;
      if (flipgrad_join_f32(&p, a.get(), grad.get(), x.get(), sums.get()) != 0) return false;
      for (int64_t i = 0; i < count; ++i) {
        const double t = a[i], unit = x[i], slope = 2 * sigmoid(t / 1.5) * sigmoid(-t / 1.5) / 1.5 * grad[i];
        // A rounded quotient of a far pre-activation counts in the exponent.
        if (std::fabs(slopes[i] - slope) > 1e-5 * std::fabs(slope) + 1e-36) return false;
        if (std::fabs(mean[i] - unit * std::tanh((unit * t - ratio[i]) / 2)) > 1e-5) return false;
        if (std::fabs(sums[i] - unit * (t + unit * grad[i])) > 1e-5 * (1 + std::fabs(t))) return false;
      }
    }
  }
  return true;
}

// Sums of groups, spread over the inputs of a convolution.
bool spread_right(const Shape& s) {
  const FlipProblem sizes = problem_of(s, 1, 0);
  const int64_t out_places = sizes.out_height * sizes.out_width, images = s.batch * s.groups, cells = s.kernel[0] * s.kernel[1];
  const int64_t count = images * s.in * s.height * s.width;
  const Memory<float> total = numbers<float>(images * out_places, 1), kernel = numbers<float>(s.groups * cells, 1);
  const Memory<float> share = numbers<float>(s.groups * s.in, 1), x = numbers<float>(count, 1), own = numbers<float>(count, 1);
  std::vector<double> spread(images * s.height * s.width);
  for (int64_t image = 0; image < images; ++image) {
    for (int64_t place = 0; place < out_places; ++place) {
      for (int64_t cell = 0; cell < cells; ++cell) {
        const int64_t row = place / sizes.out_width * s.stride[0] - s.padding[0] + cell / s.kernel[1] * s.dilation[0];
        const int64_t column = place % sizes.out_width * s.stride[1] - s.padding[1] + cell % s.kernel[1] * s.dilation[1];
        if (row < 0 || row >= s.height || column < 0 || column >= s.width) continue;
        spread[(image * s.height + row) * s.width + column] +=
            double{total[image * out_places + place]} * kernel[image % s.groups * cells + cell];
      }
    }
  }
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      for (int64_t of_ratio : {0, 1}) {
        SpreadProblem p{s.batch, s.groups, s.in, s.height, s.width, sizes.out_height, sizes.out_width,
                        {},      {},       {},   {},       of_ratio, 0,                threads,         portable};
        for (int axis = 0; axis < 2; ++axis) {
          p.kernel[axis] = s.kernel[axis];
          p.stride[axis] = s.stride[axis];
          p.padding[axis] = s.padding[axis];
          p.dilation[axis] = s.dilation[axis];
        }
        Memory<float> sums(new float[count]);
        std::copy(own.get(), own.get() + count, sums.get());
        if (flipgrad_spread_f32(&p, total.get(), kernel.get(), share.get(), x.get(), sums.get()) != 0) return false;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t places = s.height * s.width, channel = i / places, image = channel / s.in;
          const double shared = share[channel % (s.groups * s.in)] * spread[image * places + i % places];
          const double right = x[i] * (of_ratio ? own[i] + x[i] * shared : shared + x[i] * own[i]);
          if (std::fabs(sums[i] - right) > 1e-4 * (1 + std::fabs(right))) return false;
        }
        if (s.groups > 1) continue;
        // The same with the channels of a place next to each other.
        const int64_t places = s.height * s.width;
        Memory<float> units(new float[count]), last(new float[count]);
        const auto moved = [&](int64_t i) { return (i / places / s.in * places + i % places) * s.in + i / places % s.in; };
        for (int64_t i = 0; i < count; ++i) units[moved(i)] = x[i], last[moved(i)] = own[i];
        p.channels_last = 1;
        if (flipgrad_spread_f32(&p, total.get(), kernel.get(), share.get(), units.get(), last.get()) != 0) return false;
        for (int64_t i = 0; i < count; ++i) {
          if (std::fabs(last[moved(i)] - sums[i]) > 1e-5 * (1 + std::fabs(sums[i]))) return false;
        }
      }
    }
  }
  return true;
}

// The functions of weights: w (2 + c) and w^2 (3 + c), c = 2 (w / limit)^2 - 1.
bool weights_right(int64_t count) {
  const float coefficients[] = {2, 1, 3, 1};
  const Memory<float> weight = numbers<float>(count, 0.5);
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const WeightProblem p{count, 2, 1, 2, coefficients, 4.0, threads, portable};
      Memory<float> out = numbers<float>(2 * count, 1e30);
      if (flipgrad_weights_f32(&p, weight.get(), out.get()) != 0) return false;
      for (int64_t i = 0; i < count; ++i) {
        const double w = weight[i], c = 2 * w * w / 16 - 1;
        if (!close(out[i], w * (2 + c)) || !close(out[count + i], w * w * (3 + c))) return false;
      }
    }
  }
  return true;
}

// The fused product with the functions of weights w (2 + c), w (1 - c) and `curvatures` of w^2 (3 + c), as in weights_right.
bool products_right(int64_t batch, int64_t out, int64_t in, int64_t curvatures) {
  const float coefficients[] = {2, 1, 1, -1, 3, 1};
  const Memory<float> x = numbers<float>(batch * in, 1), weight = numbers<float>(out * in, 0.5);
  const Memory<float> difference = numbers<float>(2 * batch * out, 1), curvature = numbers<float>(curvatures * batch * out, 1);
  for (int64_t i = 0; i < batch * in; ++i) x[i] = i % 11 == 3 ? 0.0f : std::copysign(1.0f, x[i]);
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const ProductProblem p{batch, in, out, 2, curvatures, 2, coefficients, 4.0, threads, portable};
      Memory<float> u = numbers<float>(batch * in, 1e30);
      if (flipgrad_product_f32(&p, difference.get(), curvature.get(), weight.get(), x.get(), u.get()) != 0) return false;
      for (int64_t n = 0; n < batch * in; ++n) {
        double right = 0, size = 0;
        for (int64_t j = 0; j < out; ++j) {
          const double w = weight[j * in + n % in], c = 2 * w * w / 16 - 1;
          const float* e = difference.get() + n / in * 2 * out + j;
          const double term = x[n] * w * (e[0] * (2 + c) + e[out] * (1 - c)) + (curvatures ? curvature[n / in * out + j] * w * w * (3 + c) : 0);
          right += x[n] * term;
          size += std::fabs(term);
        }
        if (!(std::fabs(u[n] - right) <= 1e-5 * size)) return false;
      }
    }
  }
  return true;
}

// The log ratio by one product, as flips/one_product.py has it, for the noise's scale 1.5.
bool one_product_right(int64_t batch, int64_t outputs, int64_t inputs, double size) {
  const Memory<float> weight = numbers<float>(outputs * inputs, size), a = numbers<float>(batch * outputs, 2);
  const Memory<float> y = numbers<float>(batch * outputs, 1), x = numbers<float>(batch * inputs, 1);
  for (int64_t i = 0; i < batch * outputs; ++i) y[i] = std::copysign(1.0f, y[i]);
  for (int64_t i = 0; i < batch * inputs; ++i) x[i] = i % 11 == 3 ? 0.0f : std::copysign(1.0f, x[i]);
  std::vector<double> second(outputs), share(inputs);
  double fourths = 0, squares = 0;
  for (int64_t j = 0; j < outputs; ++j) {
    double fourth = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      const double square = std::pow(weight[j * inputs + i], 2);
      second[j] += square / inputs;
      fourth += square * square / inputs;
    }
    fourths += fourth / second[j];
    squares += second[j];
  }
  const double kurtosis = fourths / squares;
  for (int64_t i = 0; i < inputs; ++i) {
    for (int64_t j = 0; j < outputs; ++j) share[i] += std::pow(weight[j * inputs + i], 2) / (kurtosis * second[j]) / outputs;
  }
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const OneProductProblem p{batch, inputs, outputs, 1.5, threads, portable};
      Memory<float> ratio = numbers<float>(batch * inputs, 1e30);
      if (flipgrad_one_product_f32(&p, weight.get(), a.get(), y.get(), x.get(), ratio.get()) != 0) return false;
      for (int64_t n = 0; n < batch * inputs; ++n) {
        double right = 0, terms = 0;
        for (int64_t j = 0; j < outputs; ++j) {
          const int64_t at = n / inputs * outputs + j;
          const double node = std::sqrt(kurtosis * second[j]), now = log_sigmoid(y[at] * a[at] / 1.5);
          const double below = log_sigmoid(y[at] * (a[at] - 2 * node) / 1.5), above = log_sigmoid(y[at] * (a[at] + 2 * node) / 1.5);
          const double odd = weight[j * inputs + n % inputs] / node * (below - above) / 2;
          const double even = share[n % inputs] * ((below + above) / 2 - now);
          right += x[n] * odd + x[n] * x[n] * even;
          terms += std::fabs(odd) + std::fabs(even);
        }
        if (!(std::fabs(ratio[n] - right) <= 1e-5 * terms)) return false;
      }
    }
  }
  return true;
}

// A step beyond those that a product of exponentials can take is refused.
bool large_steps_refused() {
  const float weight[] = {50.0f}, one[] = {1.0f};
  float ratio[1];
  const OneProductProblem p{1, 1, 1, 1.5, 1, 0};
  return flipgrad_one_product_f32(&p, weight, one, one, one, ratio) == 2;
}

bool moments_right(int64_t count, int64_t every) {
  const Memory<float> numbers_ = numbers<float>(count, 1);
  double largest = 0, second = 0, fourth = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i / 256 % every != 0) continue;
    const double square = numbers_[i] * numbers_[i];
    largest = std::max(largest, square);
    second += square;
    fourth += square * square;
  }
  for (int64_t portable : {0, 1}) {
    const MomentProblem p{count, every, 3, portable};
    double found[3];
    if (flipgrad_moments_f32(&p, numbers_.get(), found) != 0) return false;
    if (!close(found[0], largest) || !close(found[1], second) || !close(found[2], fourth)) return false;
  }
  return true;
}

bool squares_right(int64_t outputs, int64_t inputs) {
  const int64_t count = outputs * inputs;
  const Memory<float> weight = numbers<float>(count, 1), both(new float[2 * count]), fourths(new float[inputs]);
  std::vector<double> wanted(inputs);
  double largest = 0, second = 0, sixth = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double square = weight[i] * weight[i];
    largest = std::max(largest, square);
    second += square;
    sixth += square * square * square;
    wanted[i % inputs] += square * square;
  }
  for (int64_t portable : {0, 1, 2}) {
    // The last time without the powers, which are as before.
    const SquareProblem p{outputs, inputs, portable < 2, 3, portable % 2};
    double found[3];
    if (flipgrad_squares_f32(&p, weight.get(), fourths.get(), found, portable < 2 ? both.get() : nullptr) != 0) return false;
    // Sums of up to 70,000 terms of one sign in float32.
    const bool sums = std::fabs(found[1] - second) <= 1e-4 * second && std::fabs(found[2] - sixth) <= 1e-4 * sixth;
    if (!close(found[0], largest) || !sums) return false;
    for (int64_t i = 0; i < count; ++i) {
      if (both[i] != weight[i] || !close(both[count + i], weight[i] * weight[i])) return false;
    }
    for (int64_t i = 0; i < inputs; ++i) {
      if (!close(fourths[i], wanted[i])) return false;
    }
  }
  return true;
}

// Flips of a cross-entropy behind a linear map, and the averaged gradients of its weight and bias.
bool softmax_right(int64_t batch, int64_t units, int64_t outputs) {
  const int64_t count = batch * units, weights = outputs * units;
  Memory<float> x = numbers<float>(count, 1), weight = numbers<float>(weights, 0.5), opposite = numbers<float>(count, 1);
  const Memory<float> logits = numbers<float>(batch * outputs, 2), grad = numbers<float>(batch, 1);
  Memory<float> targets(new float[batch * outputs]);
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] < 0 ? -1.0f : 1.0f;
  for (int64_t i = 0; i < count; ++i) opposite[i] = static_cast<float>(sigmoid(opposite[i]));
  for (int64_t i = 0; i < weights; ++i) weight[i] = std::max(-2.0f, std::min(2.0f, weight[i]));
  for (int64_t i = 0; i < batch * outputs; ++i) targets[i] = i % outputs == i / outputs % outputs ? 1.0f - 0.25f * (outputs - 1) / outputs : 0.25f / outputs;
  std::vector<double> derivative(count), in_weight(weights), in_bias(outputs);
  for (int64_t b = 0; b < batch; ++b) {
    // The loss and its slopes in the logits, of the sample or after a flip of unit i.
    const auto slopes = [&](int64_t i, std::vector<double>& slope) {
      double sum = 0;
      for (int64_t k = 0; k < outputs; ++k) {
        const double moved = logits[b * outputs + k] - (i < 0 ? 0.0 : 2.0 * x[b * units + i] * weight[k * units + i]);
        sum += slope[k] = std::exp(moved);
      }
      double loss = std::log(sum);
      for (int64_t k = 0; k < outputs; ++k) {
        const double moved = logits[b * outputs + k] - (i < 0 ? 0.0 : 2.0 * x[b * units + i] * weight[k * units + i]);
        loss -= targets[b * outputs + k] * moved;
        slope[k] = slope[k] / sum - targets[b * outputs + k];
      }
      return loss;
    };
    std::vector<double> here(outputs), there(outputs);
    const double loss = slopes(-1, here);
    for (int64_t i = 0; i < units; ++i) {
      const double other = opposite[b * units + i], unit = x[b * units + i];
      derivative[b * units + i] = (loss - slopes(i, there)) * unit / 2;
      for (int64_t k = 0; k < outputs; ++k) {
        in_weight[k * units + i] += grad[b] * unit * ((1 - other) * here[k] - other * there[k]);
        in_bias[k] += grad[b] * ((1 - other) * here[k] + other * there[k]) / units;
      }
    }
  }
  const auto near = [](double found, double right) { return std::fabs(found - right) <= 2e-5 * (1 + std::fabs(right)); };
  for (int64_t threads : {1, 3}) {
    for (int64_t portable : {0, 1}) {
      const SoftmaxProblem s{batch, units, outputs, threads, portable};
      const Memory<float> p(new float[batch * outputs]), grown(new float[2 * weights]), excess(new float[count]), found(new float[count]);
      if (flipgrad_softmax_f32(&s, x.get(), logits.get(), targets.get(), weight.get(), p.get(), grown.get(), excess.get(), found.get()) != 0) {
        return false;
      }
      const Memory<float> of_weight(new float[weights]), of_bias(new float[outputs]);
      if (flipgrad_softmax_gradient_f32(&s, x.get(), opposite.get(), excess.get(), grown.get(), p.get(), targets.get(), grad.get(),
                                        of_weight.get(), of_bias.get()) != 0) {
        return false;
      }
      for (int64_t i = 0; i < count; ++i) {
        if (!near(found[i], derivative[i])) return false;
      }
      for (int64_t i = 0; i < weights; ++i) {
        if (!near(of_weight[i], in_weight[i])) return false;
      }
      for (int64_t k = 0; k < outputs; ++k) {
        if (!near(of_bias[k], in_bias[k])) return false;
      }
      // A weight that is too large or no number, and a zero in the place of a unit.
      for (double wrong : {2.1, -3.0, std::nan("")}) {
        const float kept = std::exchange(weight[weights - 1], static_cast<float>(wrong));
        const int status =
            flipgrad_softmax_f32(&s, x.get(), logits.get(), targets.get(), weight.get(), p.get(), grown.get(), excess.get(), found.get());
        weight[weights - 1] = kept;
        if (status != 2) return false;
      }
      const float kept = std::exchange(x[count / 2], 0.0f);
      const int status =
          flipgrad_softmax_f32(&s, x.get(), logits.get(), targets.get(), weight.get(), p.get(), grown.get(), excess.get(), found.get());
      x[count / 2] = kept;
      if (status != 2) return false;
    }
  }
  return true;
}

// Flips of rank one, with E, O and the sums over channels and places; and those of log ratios.
bool rank_one_right(int64_t images, int64_t channels, int64_t groups, int64_t block, double size) {
  const int64_t rows = images * channels, count = rows * block;
  const Memory<float> a = numbers<float>(count, 3), grad = numbers<float>(count, 1), sums = numbers<float>(count, 1);
  const Memory<float> steps = numbers<float>(channels, size), states = numbers<float>(count, 1);
  for (int64_t i = 0; i < count; ++i) states[i] = states[i] < 0 ? -1.0f : 1.0f;
  const auto log_cdf = [](double t) { return t < 0 ? t - std::log1p(std::exp(t)) : -std::log1p(std::exp(-t)); };
  bool right = true;
  for (int64_t portable : {0, 1, 2}) {
    for (int64_t of_logs : {0, 1}) {
      const RankOneProblem p{images, channels, groups, block, of_logs, 1 - of_logs, 1.0, 3, portable};
      Memory<float> odd = numbers<float>(count, 1), even = numbers<float>(of_logs ? 0 : count, 1);
      Memory<float> spread = numbers<float>(images * groups * block, 1), out = numbers<float>(of_logs ? 0 : 3 * rows, 1);
      const float* given = of_logs ? states.get() : grad.get();
      const int status = flipgrad_rank_one_f32(&p, a.get(), given, sums.get(), steps.get(), odd.get(), even.get(), spread.get(),
                                               out.get());
      if (status != 0) return false;
      std::vector<double> expected(images * groups * block), evens(rows);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = i / block, image = row / channels, group = row % channels / (channels / groups);
        const double s = steps[row % channels], t = a[i], y = states[i], g = grad[i];
        const double above = of_logs ? -log_cdf(y * (t + s)) : g * sigmoid(t + s);
        const double below = of_logs ? -log_cdf(y * (t - s)) : g * sigmoid(t - s);
        const double middle = of_logs ? -log_cdf(y * t) : g * sigmoid(t), o = middle - (above + below) / 2;
        right = right && std::abs(odd[i] - (above - below) / 2) < 1e-5 && (of_logs || std::abs(even[i] - o) < 1e-5);
        expected[(image * groups + group) * block + i % block] += o;
        evens[row] += o;
      }
      for (size_t i = 0; i < expected.size(); ++i) right = right && std::abs(spread[i] - expected[i]) < 1e-4;
      for (int64_t row = 0; row < rows && !of_logs; ++row) right = right && std::abs(out[3 * row] - evens[row]) < 1e-4;
      if (of_logs || groups > 1) continue;
      // The same with the channels of a place next to each other.
      const auto moved = [&](int64_t i) { return (i / block / channels * block + i % block) * channels + i / block % channels; };
      Memory<float> at(new float[count]), of(new float[count]), with(new float[count]);
      for (int64_t i = 0; i < count; ++i) at[moved(i)] = a[i], of[moved(i)] = grad[i], with[moved(i)] = sums[i];
      Memory<float> last = numbers<float>(count, 1), curved = numbers<float>(count, 1), total = numbers<float>(images * block, 1);
      Memory<float> by_channel = numbers<float>(3 * rows, 1);
      if (flipgrad_flip_rows_f32(&p, at.get(), of.get(), with.get(), steps.get(), last.get(), curved.get(), total.get(),
                                 by_channel.get()) != 0) {
        return false;
      }
      for (int64_t i = 0; i < count; ++i) {
        right = right && std::abs(last[moved(i)] - odd[i]) < 1e-5 && std::abs(curved[moved(i)] - even[i]) < 1e-5;
      }
      for (int64_t i = 0; i < images * block; ++i) right = right && std::abs(total[i] - spread[i]) < 1e-4;
      for (int64_t i = 0; i < 3 * rows; ++i) {
        const int64_t row = i / 3, from = (row / channels * 3 + i % 3) * channels + row % channels;
        right = right && std::abs(by_channel[from] - out[i]) < 1e-4 * (1 + std::abs(out[i]));
      }
    }
  }
  return right;
}

}  // namespace

int main() {
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 1, {1, 1}, {1, 1}, {0, 0}, {1, 1}},    {3, 1, 7, 5, 5, 4, {3, 2}, {1, 1}, {0, 0}, {1, 1}},
      {9, 1, 33, 3, 3, 5, {2, 3}, {2, 1}, {1, 2}, {1, 1}},   {2, 3, 3, 2, 6, 7, {3, 3}, {1, 2}, {1, 1}, {2, 1}},
      {17, 1, 20, 33, 1, 1, {1, 1}, {1, 1}, {0, 0}, {1, 1}}, {2, 1, 96, 10, 4, 4, {1, 1}, {3, 3}, {0, 0}, {1, 1}},
      {0, 1, 4, 4, 3, 3, {3, 3}, {1, 1}, {1, 1}, {1, 1}},    {20, 2, 40, 17, 9, 3, {5, 3}, {2, 2}, {2, 1}, {1, 1}},
      {515, 1, 5, 5, 1, 1, {1, 1}, {1, 1}, {0, 0}, {1, 1}},  {9, 1, 16, 3, 1, 1, {1, 1}, {1, 1}, {0, 0}, {1, 1}},
      {3, 1, 5, 4, 267, 1, {1, 1}, {1, 1}, {0, 0}, {1, 1}},
  };
  int failures = 0;
  for (const Shape& shape : shapes) {
    for (double size : {1e-3, 0.3, 8.0}) {
      failures += !sums_right<float>(flipgrad_flip_f32, flip_term, false, shape, size, 1e-5);
      failures += !sums_right<double>(flipgrad_flip_f64, flip_term, false, shape, size, 1e-12);
      failures += !sums_right<float>(flipgrad_ratio_f32, ratio_term, true, shape, size, 1e-5);
      failures += !sums_right<double>(flipgrad_ratio_f64, ratio_term, true, shape, size, 1e-12);
    }
  }
  for (const Shape& shape : shapes) failures += !spread_right(shape);
  for (int64_t count : {0, 1, 31, 32, 33, 1000, 100001}) {
    failures += !units_right(count);
    failures += !samples_right<float>(flipgrad_sample_logistic_f32, count);
    failures += !samples_right<double>(flipgrad_sample_logistic_f64, count);
    failures += !samples_right<float>(flipgrad_sample_probability_f32, count);
    failures += !samples_right<double>(flipgrad_sample_probability_f64, count);
    failures += !slopes_right(count, 1.5, 1.5) + !slopes_right(count, 1.5, 0.8);
  }
  for (int64_t block : {1, 7, 8, 33, 20000}) failures += !features_right(3, block) + !weights_right(block);
  for (int64_t block : {1, 7, 8, 33, 20000}) failures += !log_features_right(3, block);
  failures += !log_features_right(0, 5);
  failures += !features_right(0, 5) + !weights_right(0);
  // So many small images that several are in one task, and more than one task.
  failures += !features_right(4000, 5) + !log_features_right(4000, 5);
  const int64_t products[][3] = {{0, 3, 3}, {1, 1, 1}, {3, 0, 4}, {7, 5, 17}, {13, 257, 33}, {270, 30, 131}, {6, 256, 16}};
  for (const auto& s : products) failures += !products_right(s[0], s[1], s[2], 0) + !products_right(s[0], s[1], s[2], 1);
  for (const auto& s : products) failures += !one_product_right(s[0], s[1], s[2], 0.1) + !one_product_right(s[0], s[1], s[2], 1.0);
  failures += !large_steps_refused();
  for (double size : {0.01, 0.5, 30.0}) {
    failures += !rank_one_right(0, 2, 1, 5, size) + !rank_one_right(3, 6, 3, 1, size);
    failures += !rank_one_right(2, 4, 2, 29, size) + !rank_one_right(1, 1, 1, 64, size);
  }
  for (int64_t count : {0, 1, 257, 100001}) failures += !moments_right(count, 1) + !moments_right(count, 3);
  const int64_t weights[][2] = {{0, 3}, {3, 0}, {1, 1}, {7, 5}, {33, 8}, {300, 257}, {2, 70001}};
  for (const auto& s : weights) failures += !squares_right(s[0], s[1]);
  const int64_t heads[][3] = {{1, 1, 1}, {3, 7, 2}, {5, 64, 3}, {6, 131, 17}, {2, 300, 10}};
  for (const auto& s : heads) failures += !softmax_right(s[0], s[1], s[2]);
  failures += packed_failures();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
