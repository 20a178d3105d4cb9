// Runs every step of packed networks over odd shapes and compares it with the definition, for `make sanitize`.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "packed.h"

int packed_failures();

namespace {

std::mt19937 generator(2);
using Numbers = std::vector<double>;

double normal() { return std::normal_distribution<double>()(generator); }

int64_t blocks(int64_t channels) { return (channels + 15) / 16; }
int64_t words(int64_t channels) { return (channels + 31) / 32; }

// A program, and what its steps point to. Values are [positions, channels] of real numbers or states.
struct Network {
  std::vector<PackedStep> steps;
  std::vector<int64_t> bytes, shared;
  std::vector<std::vector<int32_t>> ints;
  std::vector<std::vector<uint32_t>> words;
  std::vector<Numbers> reals;

  const int32_t* keep(std::vector<int32_t> v) { return ints.emplace_back(std::move(v)).data(); }
  const uint32_t* keep(std::vector<uint32_t> v) { return words.emplace_back(std::move(v)).data(); }
  const double* keep(Numbers v) { return reals.emplace_back(std::move(v)).data(); }

  Network() {
    ints.reserve(100);
    words.reserve(100);
    reals.reserve(100);
  }

  // Slot 0 is the first one to be made.
  int64_t slot(int64_t size) {
    bytes.push_back(size);
    return static_cast<int64_t>(bytes.size()) - 1;
  }

  PackedStep& add(PackedKind kind, int64_t in, int64_t out, int64_t positions, int64_t in_channels, int64_t out_channels) {
    PackedStep step{};
    step.kind = kind;
    step.in = in;
    step.second = -1;
    step.out = out;
    step.positions = positions;
    step.in_channels = in_channels;
    step.out_channels = out_channels;
    step.sign = -1;
    step.result = -1;
    step.tile = 5;
    return steps.emplace_back(step);
  }

  // The results [samples, batch, channels, positions] for every instruction set, with one and with several threads: `right` says
  // whether they are.
  template <class Right>
  bool check(int64_t batch, int64_t samples, const Numbers& input, int64_t outputs, int64_t first_draw, Right right) {
    shared.assign(bytes.size(), 0);
    const int64_t count = static_cast<int64_t>(steps.size());
    const int64_t sharing = std::min(first_draw, count - 1);
    for (int64_t i = 0; i < sharing; ++i) shared[steps[i].out] = 1;
    const PackedProgram program{steps.data(),  count, sharing, bytes.data(), shared.data(), static_cast<int64_t>(bytes.size()),
                                static_cast<int64_t>(input.size()) / batch, outputs};
    bool good = true;
    for (int64_t instructions : {0, 1, 2})
      for (int64_t threads : {1, 3, 7}) {
        const PackedCall call{batch, samples, 2, 1, 77, threads, instructions};
        std::vector<float> found(samples * batch * outputs, NAN);
        good = good && flipgrad_packed_run(&program, &call, input.data(), found.data()) == 0 && right(found);
      }
    return good;
  }
};

Numbers randoms(int64_t count) {
  Numbers v(count);
  for (double& each : v) each = normal();
  return v;
}

// A convolution with zero padding of images [height, width, channels], every place with a list of its own.
struct Shape {
  int64_t channels, outputs, height, width, kernel, stride, padding;

  int64_t out(int64_t size) const { return (size + 2 * padding - kernel) / stride + 1; }
  int64_t places() const { return out(height) * out(width); }
};

void add_windows(Network& net, PackedStep& step, const Shape& s, int64_t elements, std::vector<PackedRun>& runs) {
  std::vector<int32_t> bases, lists, list_runs{0}, list_inputs;
  for (int64_t y = 0; y < s.out(s.height); ++y)
    for (int64_t x = 0; x < s.out(s.width); ++x) {
      for (int64_t ky = 0; ky < s.kernel; ++ky)
        for (int64_t kx = 0; kx < s.kernel; ++kx) {
          const int64_t iy = y * s.stride + ky - s.padding, ix = x * s.stride + kx - s.padding;
          if (iy < 0 || ix < 0 || iy >= s.height || ix >= s.width) continue;
          runs.push_back({static_cast<int32_t>((iy * s.width + ix) * elements), static_cast<int32_t>((ky * s.kernel + kx) * elements),
                          static_cast<int32_t>(elements)});
        }
      bases.push_back(0);
      lists.push_back(static_cast<int32_t>(lists.size()));
      list_inputs.push_back(static_cast<int32_t>(s.channels * (static_cast<int64_t>(runs.size()) - list_runs.back())));
      list_runs.push_back(static_cast<int32_t>(runs.size()));
    }
  step.bases = net.keep(bases);
  step.lists = net.keep(lists);
  step.list_runs = net.keep(list_runs);
  step.list_inputs = net.keep(list_inputs);
  step.runs = runs.data();
  step.filter = s.kernel * s.kernel * elements;
  step.lows = net.keep(std::vector<int32_t>(blocks(s.outputs), 0));
}

// The sums by weights [outputs, kernel, kernel, channels] at every place, [places, outputs].
Numbers sums_of(const Shape& s, const double* x, const Numbers& w) {
  Numbers sums;
  for (int64_t y = 0; y < s.out(s.height); ++y)
    for (int64_t i = 0; i < s.out(s.width); ++i)
      for (int64_t o = 0; o < s.outputs; ++o) {
        double sum = 0;
        for (int64_t ky = 0; ky < s.kernel; ++ky)
          for (int64_t kx = 0; kx < s.kernel; ++kx)
            for (int64_t c = 0; c < s.channels; ++c) {
              const int64_t iy = y * s.stride + ky - s.padding, ix = i * s.stride + kx - s.padding;
              if (iy < 0 || ix < 0 || iy >= s.height || ix >= s.width) continue;
              sum += x[(iy * s.width + ix) * s.channels + c] * w[((o * s.kernel + ky) * s.kernel + kx) * s.channels + c];
            }
        sums.push_back(sum);
      }
  return sums;
}

// The caller's images [channels, places] with their channels last.
Numbers channels_last(const Numbers& input, int64_t batch, int64_t places) {
  const int64_t size = static_cast<int64_t>(input.size()) / batch, channels = size / places;
  Numbers x(input.size());
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i)
    x[i] = input[i / size * size + i % channels * places + i % size / channels];
  return x;
}

int64_t add_input(Network& net, int64_t places, int64_t channels) {
  const int64_t out = net.slot(8 * places * channels);
  net.add(kPackedInput, -1, out, places, channels, channels);
  return out;
}

int64_t add_states(Network& net, int64_t in, int64_t places, int64_t channels) {
  const int64_t out = net.slot(4 * places * words(channels));
  net.add(kPackedSign, in, out, places, channels, channels);
  return out;
}

void add_output(Network& net, int64_t in, int64_t places, int64_t channels, bool bits) {
  if (bits) {
    const int64_t reals = net.slot(8 * places * channels);
    net.add(kPackedToReal, in, reals, places, channels, channels);
    in = reals;
  }
  net.add(kPackedOutput, in, -1, places, channels, channels);
}

Numbers signs(Numbers v) {
  for (double& each : v) each = each >= 0 ? 1 : -1;
  return v;
}

// Sums of states, which become states by a threshold or a draw, or real numbers; masked: half of the channels do not count.
bool bit_sums_right(const Shape& s, PackedResult result, bool masked) {
  const int64_t batch = 5, samples = result == kPackedDrawn ? 3 : 1, elements = words(s.channels), places = s.height * s.width;
  Network net;
  const int64_t states = add_states(net, add_input(net, places, s.channels), places, s.channels);
  const int64_t out = net.slot(result == kPackedReal ? 8 * s.places() * s.outputs : 4 * s.places() * words(s.outputs));
  PackedStep& step = net.add(kPackedSums, states, out, s.places(), s.channels, s.outputs);
  std::vector<PackedRun> runs;
  add_windows(net, step, s, elements, runs);
  Numbers w = signs(randoms(s.outputs * s.kernel * s.kernel * s.channels));
  std::vector<uint32_t> bits(blocks(s.outputs) * step.filter * 16), masks(bits.size());
  const int64_t counted = masked ? (s.channels + 1) / 2 : s.channels;
  for (int64_t i = 0; i < static_cast<int64_t>(w.size()); ++i) {
    const int64_t o = i / (s.kernel * s.kernel * s.channels), tap = i / s.channels % (s.kernel * s.kernel), c = i % s.channels;
    const int64_t at = (o / 16 * step.filter + tap * elements + c / 32) * 16 + o % 16;
    bits[at] |= static_cast<uint32_t>(w[i] > 0) << c % 32;
    if (c < counted) masks[at] |= 1u << c % 32;
    else w[i] = 0;
  }
  std::vector<int32_t> inputs(step.list_inputs, step.list_inputs + s.places()), thresholds(16 * blocks(s.outputs), INT32_MAX);
  for (int32_t& each : inputs) each = static_cast<int32_t>(each / s.channels * counted);
  Numbers scale(16 * blocks(s.outputs)), shift(scale.size());
  const int64_t most = s.kernel * s.kernel * counted;
  std::vector<uint32_t> table(s.outputs * (2 * most + 1));
  for (int64_t o = 0; o < s.outputs; ++o) {
    thresholds[o] = static_cast<int32_t>(o % 7) - 3;
    scale[o] = normal();
    shift[o] = normal();
    // Certain ones, so that what is drawn is known: +1 from the threshold on.
    for (int64_t t = -most; t <= most; ++t) table[o * (2 * most + 1) + t + most] = t >= thresholds[o] ? UINT32_MAX : 0;
  }
  step.weights = net.keep(bits);
  step.masks = masked ? net.keep(masks) : nullptr;
  step.list_inputs = net.keep(inputs);
  step.result = result;
  step.inputs = most;
  step.thresholds = net.keep(thresholds);
  step.table = net.keep(table);
  step.table_stride = 2 * most + 1;
  step.sign = result == kPackedDrawn ? 1 : -1;
  step.scale = net.keep(scale);
  step.shift = net.keep(shift);
  add_output(net, out, s.places(), s.outputs, result != kPackedReal);
  const Numbers input = randoms(batch * places * s.channels), x = signs(channels_last(input, batch, places));
  return net.check(batch, samples, input, s.places() * s.outputs, 2, [&](const std::vector<float>& found) {
    bool good = true;
    for (int64_t row = 0; row < batch * samples; ++row) {
      const Numbers sums = sums_of(s, x.data() + row % batch * places * s.channels, w);
      for (int64_t i = 0; i < s.places() * s.outputs; ++i) {
        const int64_t o = i % s.outputs;
        const double right = result == kPackedReal ? sums[i] * scale[o] + shift[o] : sums[i] >= thresholds[o] ? 1 : -1;
        good = good && found[(row * s.outputs + o) * s.places() + i / s.outputs] == static_cast<float>(right);
      }
    }
    return good;
  });
}

// A real convolution, to states or numbers.
bool real_sums_right(const Shape& s, bool bits) {
  const int64_t batch = 5, places = s.height * s.width;
  Network net;
  const int64_t in = add_input(net, places, s.channels);
  const int64_t out = net.slot(bits ? 4 * s.places() * words(s.outputs) : 8 * s.places() * s.outputs);
  PackedStep& step = net.add(kPackedConvolution, in, out, s.places(), s.channels, s.outputs);
  std::vector<PackedRun> runs;
  add_windows(net, step, s, s.channels, runs);
  const Numbers w = randoms(s.outputs * step.filter);
  Numbers weights(blocks(s.outputs) * step.filter * 16), bias(16 * blocks(s.outputs)), scale = bias, shift = bias;
  for (int64_t i = 0; i < static_cast<int64_t>(w.size()); ++i) {
    const int64_t o = i / step.filter;
    weights[(o / 16 * step.filter + i % step.filter) * 16 + o % 16] = w[i];
  }
  for (int64_t o = 0; o < s.outputs; ++o) {
    bias[o] = normal();
    scale[o] = normal();
    shift[o] = normal();
  }
  step.weights = net.keep(weights);
  step.bias = net.keep(bias);
  step.scale = net.keep(scale);
  step.shift = net.keep(shift);
  step.result = bits ? kPackedThreshold : kPackedReal;
  add_output(net, out, s.places(), s.outputs, bits);
  const Numbers input = randoms(batch * places * s.channels), x = channels_last(input, batch, places);
  return net.check(batch, 1, input, s.places() * s.outputs, 9, [&](const std::vector<float>& found) {
    bool good = true;
    for (int64_t row = 0; row < batch; ++row) {
      const Numbers sums = sums_of(s, x.data() + row * places * s.channels, w);
      for (int64_t i = 0; i < s.places() * s.outputs; ++i) {
        const int64_t o = i % s.outputs;
        const double a = (sums[i] + bias[o]) * scale[o] + shift[o];
        const double right = bits ? (a >= 0 ? 1 : -1) : a;
        good = good && std::fabs(found[(row * s.outputs + o) * s.places() + i / s.outputs] - right) < 1e-5 * (1 + std::fabs(right));
      }
    }
    return good;
  });
}

// Pooling of states and of numbers.
bool pools_right(const Shape& s, PackedKind kind) {
  const int64_t batch = 5, places = s.height * s.width, c = s.channels;
  const bool bits = kind == kPackedAny;
  Network net;
  int64_t in = add_input(net, places, c);
  if (bits) in = add_states(net, in, places, c);
  const int64_t out = net.slot(bits ? 4 * s.places() * words(c) : 8 * s.places() * c);
  PackedStep& step = net.add(kind, in, out, s.places(), c, c);
  std::vector<PackedRun> runs;
  add_windows(net, step, s, bits ? words(c) : c, runs);
  step.factor = 0.5;
  add_output(net, out, s.places(), c, bits);
  const Numbers input = randoms(batch * places * c), x = bits ? signs(channels_last(input, batch, places)) : channels_last(input, batch, places);
  return net.check(batch, 1, input, s.places() * c, 9, [&](const std::vector<float>& found) {
    bool good = true;
    for (int64_t i = 0; i < batch * s.places() * c; ++i) {
      const int64_t row = i / (s.places() * c), channel = i / s.places() % c, y = i % s.places() / s.out(s.width), z = i % s.out(s.width);
      double most = -HUGE_VAL, sum = 0;
      for (int64_t iy = y * s.stride - s.padding; iy < y * s.stride - s.padding + s.kernel; ++iy)
        for (int64_t ix = z * s.stride - s.padding; ix < z * s.stride - s.padding + s.kernel; ++ix) {
          if (iy < 0 || ix < 0 || iy >= s.height || ix >= s.width) continue;
          const double number = x[(row * places + iy * s.width + ix) * c + channel];
          most = std::max(most, number);
          sum += number;
        }
      good = good && std::fabs(found[i] - (kind == kPackedAverage ? 0.5 * sum : most)) < 1e-6;
    }
    return good;
  });
}

// Steps that move numbers or states: all channels of all places in reverse order, whole places in reverse, and concatenation.
bool moves_right(int64_t places, int64_t c, bool bits) {
  const int64_t batch = 5, size = places * c, wide = 2 * c + 3;
  Network net;
  int64_t in = add_input(net, places, c);
  const auto slot = [&](int64_t p, int64_t channels) { return net.slot(bits ? 4 * p * words(channels) : 8 * p * channels); };
  if (bits) in = add_states(net, in, places, c);
  std::vector<int32_t> elements(size), whole(places), first(places), second(places);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t from = size - 1 - i;
    elements[i] = static_cast<int32_t>(i == 0 ? -1 : bits ? from / c * words(c) * 32 + from % c : from);
  }
  for (int64_t p = 0; p < places; ++p) {
    whole[p] = static_cast<int32_t>(p == 0 ? -1 : places - 1 - p);
    first[p] = static_cast<int32_t>(2 * p);
    second[p] = static_cast<int32_t>(2 * p + 1);
  }
  const int64_t gathered = slot(places, c), placed = slot(places, c), scattered = slot(2 * places, c), inserted = slot(2 * places, wide);
  PackedStep* step = &net.add(bits ? kPackedGatherBits : kPackedGather, in, gathered, places, c, c);
  step->index = net.keep(elements);
  step->factor = 1;
  step = &net.add(bits ? kPackedPlacesBits : kPackedPlaces, in, placed, places, c, c);
  step->index = net.keep(whole);
  step->factor = 1;
  net.add(bits ? kPackedScatterBits : kPackedScatter, gathered, scattered, places, c, c).index = net.keep(first);
  net.add(bits ? kPackedScatterBits : kPackedScatter, placed, scattered, places, c, c).index = net.keep(second);
  // Twice side by side, and three channels of another value between them.
  const int64_t three = add_input(net, 2 * places, 3), between = bits ? add_states(net, three, 2 * places, 3) : three;
  const PackedKind insert = bits ? kPackedInsertBits : kPackedInsert;
  net.add(insert, scattered, inserted, 2 * places, c, wide).first = 0;
  net.add(insert, between, inserted, 2 * places, 3, wide).first = c;
  net.add(insert, scattered, inserted, 2 * places, c, wide).first = c + 3;
  add_output(net, inserted, 2 * places, wide, bits);
  // Both values are read from the same input, which is as large as the larger one.
  const int64_t input_size = std::max(size, 2 * places * 3);
  const Numbers input = randoms(batch * input_size);
  return net.check(batch, 1, input, 2 * places * wide, 99, [&](const std::vector<float>& found) {
    bool good = true;
    for (int64_t i = 0; i < batch * 2 * places * wide; ++i) {
      const int64_t row = i / (2 * places * wide), channel = i / (2 * places) % wide, p = i % (2 * places);
      const double* x = input.data() + row * input_size;
      double right;
      if (channel >= c && channel < c + 3) {
        right = x[(channel - c) * 2 * places + p];
      } else {
        const int64_t own = channel < c ? channel : channel - c - 3;
        // The places of both values take turns; the first place of the one and the first number of the other are outside.
        const int64_t at = p / 2 * c + own, from = p % 2 == 0 ? size - 1 - at : (places - 1 - p / 2) * c + own;
        right = (p % 2 == 0 ? at == 0 : p / 2 == 0) ? 1 : x[from % c * places + from / c];
      }
      if (bits) right = right >= 0 ? 1 : -1;
      good = good && found[i] == static_cast<float>(right);
    }
    return good;
  });
}

// Functions of every number, of one after the other, and their sum.
bool functions_right(int64_t places, int64_t c) {
  const int64_t batch = 5;
  Network net;
  const int64_t in = add_input(net, places, c), a = net.slot(8 * places * c), b = net.slot(8 * places * c), sum = net.slot(8 * places * c);
  Numbers scale(16 * blocks(c)), shift(scale.size());
  for (int64_t i = 0; i < c; ++i) {
    scale[i] = normal();
    shift[i] = normal();
  }
  PackedStep* step = &net.add(kPackedAffine, in, a, places, c, c);
  step->scale = net.keep(scale);
  step->shift = net.keep(shift);
  net.add(kPackedPrelu, in, b, places, c, c).scale = net.keep(scale);
  net.add(kPackedAdd, a, sum, places, c, c).second = b;
  net.add(kPackedRelu, in, b, places, c, c);
  net.add(kPackedAdd, sum, sum, places, c, c).second = b;
  for (PackedFunction function : {kPackedHardTanh, kPackedTanh, kPackedSigmoid, kPackedSilu, kPackedElu, kPackedSoftplus}) {
    step = &net.add(kPackedActivation, in, b, places, c, c);
    step->function = function;
    step->factor = function == kPackedElu ? 0.7 : -0.3;
    step->margin = 0.4;
    net.add(kPackedAdd, sum, sum, places, c, c).second = b;
  }
  add_output(net, sum, places, c, false);
  const Numbers input = randoms(batch * places * c);
  return net.check(batch, 1, input, places * c, 99, [&](const std::vector<float>& found) {
    bool good = true;
    for (int64_t i = 0; i < batch * places * c; ++i) {
      const int64_t channel = i / places % c;
      const double z = input[i], sigmoid = 1 / (1 + std::exp(-z));
      double right = z * scale[channel] + shift[channel] + (z >= 0 ? z : z * scale[channel]) + std::max(z, 0.0);
      right += std::min(std::max(z, -0.3), 0.4) + std::tanh(z) + sigmoid + z * sigmoid + (z >= 0 ? z : 0.7 * std::expm1(z)) + std::log1p(std::exp(z));
      good = good && std::fabs(found[i] - right) < 1e-5 * (1 + std::fabs(right));
    }
    return good;
  });
}

// Draws from the probabilities of real numbers, by the random words of every unit.
bool draws_right(int64_t places, int64_t c, PackedNoise noise) {
  const int64_t batch = 3, samples = 19;
  Network net;
  const int64_t in = add_input(net, places, c), chances = net.slot(4 * places * c), out = net.slot(4 * places * words(c));
  PackedStep* step = &net.add(kPackedProbability, in, chances, places, c, c);
  step->function = noise;
  step->factor = 0.8;
  net.add(kPackedDraw, chances, out, places, c, c).sign = 4;
  add_output(net, out, places, c, true);
  const Numbers input = randoms(batch * places * c);
  return net.check(batch, samples, input, places * c, 2, [&](const std::vector<float>& found) {
    bool good = true;
    for (int64_t row = 0; row < batch * samples; ++row) {
      const PackedCall call{1, 1, 2 + row % batch, 1 + row / batch, 77, 1, 1};
      std::vector<uint32_t> random(places * c);
      flipgrad_packed_words(&call, 4, places * c, random.data());
      for (int64_t i = 0; i < places * c; ++i) {
        const double z = input[row % batch * places * c + i] / 0.8, tail = std::exp(-std::fabs(z));
        const double p = noise == kPackedLogistic  ? 1 / (1 + std::exp(-z))
                         : noise == kPackedNormal  ? 0.5 * std::erfc(-z / std::sqrt(2.0))
                         : noise == kPackedLaplace ? (z > 0 ? 1 - tail / 2 : tail / 2)
                                                   : std::min(std::max((z + 1) / 2, 0.0), 1.0);
        const double u = random[i % places * c + i / places] / 4294967296.0;
        good = good && (std::fabs(u - p) < 1e-9 || found[row * places * c + i] == (u < p ? 1.0f : -1.0f));
      }
    }
    return good;
  });
}

}  // namespace

int packed_failures() {
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 1, 0},   {3, 5, 4, 5, 3, 1, 1},   {33, 17, 3, 4, 2, 1, 0}, {64, 16, 5, 3, 3, 2, 1},
      {65, 33, 1, 9, 1, 1, 0}, {96, 48, 4, 3, 3, 1, 0}, {20, 70, 2, 2, 2, 1, 1}, {1000, 100, 1, 1, 1, 1, 0},
  };
  int failures = 0;
  for (const Shape& shape : shapes) {
    for (PackedResult result : {kPackedThreshold, kPackedDrawn, kPackedReal})
      for (bool masked : {false, true}) failures += !bit_sums_right(shape, result, masked);
    for (bool bits : {false, true}) failures += !real_sums_right(shape, bits);
    for (PackedKind kind : {kPackedAny, kPackedMaximum, kPackedAverage}) failures += !pools_right(shape, kind);
  }
  for (int64_t places : {1, 2, 7})
    for (int64_t channels : {1, 3, 16, 31, 32, 33, 64, 100}) {
      failures += !moves_right(places, channels, false) + !moves_right(places, channels, true) + !functions_right(places, channels);
      for (PackedNoise noise : {kPackedLogistic, kPackedNormal, kPackedLaplace, kPackedUniform})
        failures += !draws_right(places, channels, noise);
    }
  return failures;
}
