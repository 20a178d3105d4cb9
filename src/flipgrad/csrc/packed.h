// The C interface of packed networks: a program of steps over values in slots. Python fills the structures through ctypes
// (flipgrad/packed/compiled.py): keep both alike.
//
// A value has `positions` places with channels last: either states in bits, 32 channels to a word, each place beginning with a
// new word and unused bits 0; or real numbers, float64; or probabilities, uint32.
#pragma once

#include <cstdint>

extern "C" {

// Elements that lie side by side in the input and in the filter: words of states, or real numbers.
struct PackedRun {
  int32_t input, filter, length;
};

enum PackedKind : int64_t {
  // Real numbers [channels, positions] of the caller to channels last.
  kPackedInput = 0,
  // Sums over the filter: of bits, as integers t = inputs - 2 popcount(x xor w), or of real numbers.
  kPackedSums = 1,
  kPackedConvolution = 2,
  // Per position: the states' disjunction, or the numbers' maximum or sum times `factor`, over the elements that runs name.
  kPackedAny = 3,
  kPackedMaximum = 4,
  kPackedAverage = 5,
  // Per channel: a scale + shift; a, or a scale where it is negative; the larger one of a and 0.
  kPackedAffine = 6,
  kPackedPrelu = 7,
  kPackedRelu = 8,
  // Real numbers to states: a >= 0; or to the probability of +1, and these to states by random words.
  kPackedSign = 9,
  kPackedProbability = 10,
  kPackedDraw = 11,
  // out[i] = in[index[i]], or `factor` where that is negative, of real numbers or of states.
  kPackedGather = 12,
  kPackedGatherBits = 13,
  // The channels of every position, written from channel `first` on; that of channel 0 comes first.
  kPackedInsert = 14,
  kPackedInsertBits = 15,
  // Real numbers: in + second. States as real numbers.
  kPackedAdd = 16,
  kPackedToReal = 17,
  // Real numbers to the caller's float32 [channels, positions].
  kPackedOutput = 18,
  // Whole places: output place p is place index[p] of the input, or `factor` where that is negative; then the other way round,
  // input place p is written to place index[p].
  kPackedPlaces = 19,
  kPackedPlacesBits = 20,
  kPackedScatter = 21,
  kPackedScatterBits = 22,
  // A function of every real number: `function`, one of PackedFunction, of `factor` and `margin`.
  kPackedActivation = 23,
};

// What becomes of the sums: states by a threshold, states by a draw, or real numbers a scale + shift.
enum PackedResult : int64_t { kPackedThreshold = 0, kPackedDrawn = 1, kPackedReal = 2 };

enum PackedFunction : int64_t {
  kPackedHardTanh = 0,
  kPackedTanh = 1,
  kPackedSigmoid = 2,
  kPackedSilu = 3,
  kPackedElu = 4,
  kPackedSoftplus = 5,
};

enum PackedNoise : int64_t { kPackedLogistic = 0, kPackedNormal = 1, kPackedLaplace = 2, kPackedUniform = 3 };

struct PackedStep {
  // Slots: of the input, of a second one, of the output; -1 where there is none.
  int64_t kind, in, second, out;
  // Places of the output; channels in one place of the input and of the output.
  int64_t positions, in_channels, out_channels;
  // Sums: filter elements in one output channel, and of them those that are summed up where none is outside of the image.
  int64_t filter, inputs, result;
  // Which sign it is, for the random words; -1 where there are none.
  int64_t sign;
  // Tables: probabilities are at channel * table_stride + ((t + inputs) >> table_shift).
  int64_t table_stride, table_shift;
  // Insert: the first channel. Probability: which noise, whose scale is `factor`. Activation: which one.
  int64_t first, function;
  // Places that are computed together: a multiple of 64 random words, where that is possible.
  int64_t tile;
  double factor;
  // Of every output position: its first input element, and which of the lists of runs it has. List k is
  // runs[list_runs[k]] .. runs[list_runs[k + 1] - 1], and has list_inputs[k] inputs.
  const int32_t *bases, *lists, *list_runs, *list_inputs;
  const PackedRun* runs;
  // Weights [blocks of 16 output channels, filter, 16], words or float64; where there are masks, of the same layout, only
  // their bits count. A block's runs begin `lows` elements later.
  const void *weights, *masks;
  const int32_t* lows;
  // Per output channel, in blocks of 16; `bias` is what sums of real numbers start with.
  const double *bias, *scale, *shift;
  const int32_t* thresholds;
  const uint32_t* table;
  // Per output channel, and null where there is none: the probability is near a logistic one, 1 / (1 + 2^(slope t + offset)), to
  // within `margin`.
  const float *slopes, *offsets;
  double margin;
  const int32_t* index;
};

struct PackedProgram {
  const PackedStep* steps;
  int64_t count;
  // The first `shared` steps do not depend on the sample.
  int64_t shared;
  // Bytes of every slot for one example or sample, and whether it is written by one of the shared steps.
  const int64_t *slot_bytes, *slot_shared;
  int64_t slots;
  // Numbers of one example of the input, and of the output.
  int64_t input_size, output_size;
};

// Examples [batch] and samples [samples] of a program; `seed` is 64 bits. `first_example`, `first_sample`: their numbers for
// the random words.
struct PackedCall {
  int64_t batch, samples, first_example, first_sample;
  uint64_t seed;
  int64_t threads;
  // 0: the best instructions there are; 1: those that every processor of this architecture has; 2: at most AVX2.
  int64_t instructions;
};

// Input float64 [batch, input_size], output float32 [samples, batch, output_size]. Returns 0, or 1 when memory ran out.
int flipgrad_packed_run(const PackedProgram* program, const PackedCall* call, const double* input, float* output);

// Random words of units 0 .. units - 1 of one sign, for comparison with flipgrad/packed/random_words.py.
void flipgrad_packed_words(const PackedCall* call, int64_t sign, int64_t units, uint32_t* words);

// The instructions that `instructions` = 0 means: 1 those of every processor, 2 AVX2, 3 AVX-512 with VPOPCNTDQ.
int flipgrad_packed_instructions(void);
}
