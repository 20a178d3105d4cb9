// Packed networks: which kernels run, the steps of a program over places, and the split over threads.
#include "packed.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "buffer.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

// Whose random words: numbers of the example, the sample and the sign.
struct Unit {
  uint32_t example, sample, sign;
};

constexpr int64_t blocks_of(int64_t channels) { return (channels + 15) / 16; }
constexpr int64_t words_of(int64_t channels) { return (channels + 31) / 32; }
constexpr uint32_t lanes_below(int64_t count) { return count >= 16 ? 0xffffu : (1u << count) - 1; }

// Writes a block's 16 states at one place, and zeros behind the last one if it is half a word.
inline void put_bits(uint16_t* place, int64_t channels, int64_t block, uint32_t bits) {
  constexpr int64_t kSwap = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 1;
  place[block ^ kSwap] = static_cast<uint16_t>(bits);
  if (block % 2 == 0 && block + 1 == blocks_of(channels)) place[(block + 1) ^ kSwap] = 0;
}

// A probability as the number of random words below it; 2^32 is none.
inline uint32_t as_word(double p) { return static_cast<uint32_t>(std::min(std::nearbyint(p * 4294967296.0), 4294967295.0)); }

// Sums over the filter at places that have the same list of runs: of the channels of one block or of several.
using AtPlaces = void (*)(const PackedStep&, int64_t block, int64_t list, int64_t count, const void* const* in, void* const* out);

struct Sums {
  const AtPlaces* plain;
  AtPlaces masked;
  int64_t most_blocks;
};

struct Kernels {
  Sums bits_to_bits, bits_to_integers, reals_to_bits, reals_to_reals;
  const uint32_t* (*random_words)(const PackedCall&, const Unit&, int64_t first, int64_t last, uint32_t* out);
  void (*draw_from_sums)(const PackedStep&, const int32_t* t, const uint32_t* words, void* out);
  void (*draw_from_probabilities)(int64_t channels, const uint32_t* p, const uint32_t* words, void* out);
  void (*scale_sums)(const PackedStep&, const int32_t* t, double* out);
  void (*scale_reals)(const PackedStep&, const double* a, double* out);
  void (*prelu)(const PackedStep&, const double* a, double* out);
  void (*signs)(int64_t channels, const double* a, void* out);
  void (*logistic)(int64_t count, const double* a, double scale, uint32_t* out);
};

#define FLIPGRAD_WITH_AVX512
#define FLIPGRAD_KERNELS "packed_kernels.inc"
#include "for_each_target.inc"

constexpr int64_t kPortable = 1, kAvx2 = 2, kAvx512 = 3;

int64_t best_instructions() { return has_avx512_popcount() ? kAvx512 : has_avx2() ? kAvx2 : kPortable; }

const Kernels& kernels_of(const PackedCall& call) {
  const int64_t best = best_instructions(), wanted = call.instructions == 0 ? best : std::min(call.instructions, best);
  return wanted == kAvx512 ? avx512::kKernels : wanted == kAvx2 ? fastest::kKernels : portable::kKernels;
}

// Places of a tile: pointers to them are on the stack.
constexpr int64_t kMostPlaces = 64;

// Memory of one thread besides the slots: a tile of integers, and of random words.
struct Scratch {
  Buffer<int32_t> integers;
  Buffer<uint32_t> words;
};

// Some examples and samples of a call: items are (example, sample) pairs, or examples while steps are shared.
struct Piece {
  const PackedProgram& program;
  const PackedCall& call;
  const Kernels& kernels;
  const double* input;
  float* output;
  char* const* slots;
  int64_t first_example, examples, first_sample, samples;

  int64_t items(int64_t step) const { return step < program.shared ? examples : examples * samples; }
};

// The value of every item in a slot: those of one example share what shared steps wrote.
struct Value {
  char* first;
  int64_t bytes, sharers;

  template <class T>
  T* of(int64_t item) const {
    return reinterpret_cast<T*>(first + item / sharers * bytes);
  }
};

// A step on some of its places, which are numbered through all items.
class StepRun {
 public:
  StepRun(const Piece& piece, int64_t number, Scratch& scratch)
      : piece_(piece), step_(piece.program.steps[number]), shared_(number < piece.program.shared), scratch_(scratch) {
    in_ = value(step_.in);
    second_ = value(step_.second);
    out_ = value(step_.out);
  }

  void places(int64_t first, int64_t last) const {
    for (int64_t f = first, end; f < last; f = end) {
      end = std::min(f + step_.tile, last);
      if (step_.kind == kPackedSums || step_.kind == kPackedConvolution) {
        sums(f, end);
        continue;
      }
      for (int64_t from = f, to; from < end; from = to) {
        const int64_t item = from / step_.positions;
        to = std::min(end, (item + 1) * step_.positions);
        one_item(item, from - item * step_.positions, to - item * step_.positions);
      }
    }
  }

 private:
  const Piece& piece_;
  const PackedStep& step_;
  const bool shared_;
  Scratch& scratch_;
  Value in_{}, second_{}, out_{};

  Value value(int64_t slot) const {
    if (slot < 0) return {nullptr, 0, 1};
    const bool sharing = !shared_ && piece_.program.slot_shared[slot] != 0;
    return {piece_.slots[slot], piece_.program.slot_bytes[slot], sharing ? piece_.samples : 1};
  }

  Unit unit(int64_t item) const {
    const int64_t samples = shared_ ? 1 : piece_.samples;
    return {static_cast<uint32_t>(piece_.call.first_example + piece_.first_example + item / samples),
            static_cast<uint32_t>(piece_.call.first_sample + piece_.first_sample + item % samples), static_cast<uint32_t>(step_.sign)};
  }

  const uint32_t* words(int64_t item, int64_t first, int64_t last) const {
    const int64_t channels = step_.out_channels;
    return piece_.kernels.random_words(piece_.call, unit(item), first * channels, last * channels, scratch_.words.data());
  }

  // Bytes of one output place.
  int64_t place_bytes() const {
    return step_.result == kPackedReal ? step_.out_channels * static_cast<int64_t>(sizeof(double)) : words_of(step_.out_channels) * 4;
  }

  // One tile of sums. Places with the same list of runs are brought together.
  void sums(int64_t first, int64_t last) const {
    const bool bits = step_.kind == kPackedSums;
    const bool stored = bits && step_.result != kPackedThreshold;
    const int64_t row = 16 * blocks_of(step_.out_channels), element = bits ? 4 : 8, count = last - first, place = place_bytes();
    const char* in[kMostPlaces];
    char* out[kMostPlaces];
    int64_t order[kMostPlaces], list[kMostPlaces];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t item = (first + i) / step_.positions, position = (first + i) - item * step_.positions;
      in[i] = in_.of<char>(item) + element * step_.bases[position];
      out[i] = stored ? reinterpret_cast<char*>(scratch_.integers.data() + i * row) : out_.of<char>(item) + position * place;
      list[i] = step_.lists[position];
      order[i] = i;
    }
    std::stable_sort(order, order + count, [&](int64_t a, int64_t b) { return list[a] < list[b]; });
    const Kernels& k = piece_.kernels;
    const Sums& kernel = !bits ? (step_.result == kPackedThreshold ? k.reals_to_bits : k.reals_to_reals)
                               : (stored ? k.bits_to_integers : k.bits_to_bits);
    const int64_t blocks = blocks_of(step_.out_channels);
    for (int64_t block = 0, together; block < blocks; block += together) {
      together = blocks_together(kernel, block, blocks);
      const AtPlaces at_places = step_.masks != nullptr ? kernel.masked : kernel.plain[together - 1];
      const void* from[kMostPlaces];
      void* to[kMostPlaces];
      for (int64_t i = 0; i < count; ++i) {
        from[i] = in[order[i]] + element * step_.lows[block];
        to[i] = out[order[i]];
      }
      for (int64_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && list[order[end]] == list[order[i]]; ++end) {
        }
        at_places(step_, block, list[order[i]], end - i, from + i, to + i);
      }
    }
    if (stored) finish(first, last, row);
  }

  // Blocks from `block` on whose runs begin at the same element, as many as a kernel takes and alike in number.
  int64_t blocks_together(const Sums& kernel, int64_t block, int64_t blocks) const {
    if (step_.masks != nullptr) return 1;
    int64_t end = block + 1;
    while (end < blocks && step_.lows[end] == step_.lows[block]) ++end;
    const int64_t left = end - block, calls = (left + kernel.most_blocks - 1) / kernel.most_blocks;
    return (left + calls - 1) / calls;
  }

  // Integers of a tile to states or numbers.
  void finish(int64_t first, int64_t last, int64_t row) const {
    const int32_t* t = scratch_.integers.data();
    for (int64_t f = first, to; f < last; f = to) {
      const int64_t item = f / step_.positions, begin = f - item * step_.positions;
      to = std::min(last, (item + 1) * step_.positions);
      char* out = out_.of<char>(item) + begin * place_bytes();
      const uint32_t* random = step_.result == kPackedDrawn ? words(item, begin, begin + to - f) : nullptr;
      for (int64_t i = f; i < to; ++i, t += row, out += place_bytes()) {
        if (random == nullptr) {
          piece_.kernels.scale_sums(step_, t, reinterpret_cast<double*>(out));
        } else {
          piece_.kernels.draw_from_sums(step_, t, random, out);
          random += step_.out_channels;
        }
      }
    }
  }

  // Places of one item, of steps other than sums.
  void one_item(int64_t item, int64_t first, int64_t last) const {
    const int64_t channels = step_.out_channels, words_out = words_of(channels);
    const double* reals = in_.of<double>(item);
    const uint32_t* bits = in_.of<uint32_t>(item);
    double* real_out = out_.of<double>(item);
    uint32_t* bits_out = out_.of<uint32_t>(item);
    switch (step_.kind) {
      case kPackedInput: return input(item, first, last);
      case kPackedOutput: return output(item, first, last);
      case kPackedAny: return any(bits, bits_out, first, last);
      case kPackedMaximum:
      case kPackedAverage: return pool(reals, real_out, first, last);
      case kPackedGather: return gather(reals, real_out, first, last);
      case kPackedGatherBits: return gather_bits(bits, bits_out, first, last);
      case kPackedInsertBits: return insert_bits(bits, bits_out, first, last);
      case kPackedSign:
        for (int64_t p = first; p < last; ++p) piece_.kernels.signs(channels, reals + p * channels, bits_out + p * words_out);
        return;
      case kPackedProbability: return probabilities((last - first) * channels, reals + first * channels, bits_out + first * channels);
      case kPackedDraw: {
        const uint32_t* random = words(item, first, last);
        for (int64_t p = first; p < last; ++p, random += channels)
          piece_.kernels.draw_from_probabilities(channels, bits + p * channels, random, bits_out + p * words_out);
        return;
      }
      case kPackedToReal:
        for (int64_t p = first; p < last; ++p) to_reals(channels, bits + p * words_out, real_out + p * channels);
        return;
      case kPackedPlaces: return places_from(reals, real_out, channels, step_.factor, first, last);
      case kPackedPlacesBits: return bit_places_from(bits, bits_out, first, last);
      case kPackedScatter: return scatter(reals, real_out, channels, first, last);
      case kPackedScatterBits: return scatter(bits, bits_out, words_out, first, last);
      case kPackedActivation: return activation((last - first) * channels, reals + first * channels, real_out + first * channels);
      case kPackedAdd: {
        const double* second = second_.of<double>(item);
        for (int64_t i = first * channels; i < last * channels; ++i) real_out[i] = reals[i] + second[i];
        return;
      }
      default:
        for (int64_t p = first; p < last; ++p) per_channel(reals + p * step_.in_channels, real_out + p * channels);
    }
  }

  // +1 or -1 of every bit, without a branch, which states would mislead.
  static void to_reals(int64_t channels, const uint32_t* bits, double* out) {
    constexpr uint64_t kOne = 0x3ff0000000000000u;
    for (int64_t w = 0; w < words_of(channels); ++w) {
      const uint64_t negative = ~bits[w];
      for (int64_t i = 0; i < std::min<int64_t>(32, channels - 32 * w); ++i) {
        const uint64_t number = kOne | (negative >> i & 1) << 63;
        std::memcpy(out + 32 * w + i, &number, sizeof number);
      }
    }
  }

  template <class T>
  void places_from(const T* in, T* out, int64_t size, T outside, int64_t first, int64_t last) const {
    for (int64_t p = first; p < last; ++p) {
      const int64_t from = step_.index[p];
      if (from < 0) std::fill(out + p * size, out + (p + 1) * size, outside);
      else std::copy(in + from * size, in + (from + 1) * size, out + p * size);
    }
  }

  void bit_places_from(const uint32_t* in, uint32_t* out, int64_t first, int64_t last) const {
    const int64_t words = words_of(step_.out_channels), unused = 32 * words - step_.out_channels;
    const uint32_t outside = step_.factor > 0 ? ~0u : 0u;
    places_from(in, out, words, outside, first, last);
    for (int64_t p = first; p < last; ++p)
      if (step_.index[p] < 0) out[(p + 1) * words - 1] = outside >> unused;
  }

  template <class T>
  void scatter(const T* in, T* out, int64_t size, int64_t first, int64_t last) const {
    for (int64_t p = first; p < last; ++p) std::copy(in + p * size, in + (p + 1) * size, out + step_.index[p] * size);
  }

  void activation(int64_t count, const double* a, double* out) const {
    const auto apply = [&](auto function) {
      for (int64_t i = 0; i < count; ++i) out[i] = function(a[i]);
    };
    const double by = step_.factor, most = step_.margin;
    switch (step_.function) {
      case kPackedHardTanh: return apply([&](double z) { return std::min(std::max(z, by), most); });
      case kPackedTanh: return apply([](double z) { return std::tanh(z); });
      case kPackedSigmoid: return apply([](double z) { return 1 / (1 + std::exp(-z)); });
      case kPackedSilu: return apply([](double z) { return z / (1 + std::exp(-z)); });
      case kPackedElu: return apply([&](double z) { return z >= 0 ? z : by * std::expm1(z); });
      default: return apply([](double z) { return std::max(z, 0.0) + std::log1p(std::exp(-std::fabs(z))); });
    }
  }

  void per_channel(const double* a, double* out) const {
    switch (step_.kind) {
      case kPackedAffine: return piece_.kernels.scale_reals(step_, a, out);
      case kPackedPrelu: return piece_.kernels.prelu(step_, a, out);
      case kPackedRelu:
        // What is not a number stays so, here and in the maximum.
        for (int64_t c = 0; c < step_.out_channels; ++c) out[c] = a[c] < 0 ? 0 : a[c];
        return;
      default: std::copy(a, a + step_.in_channels, out + step_.first);
    }
  }

  void input(int64_t item, int64_t first, int64_t last) const {
    const double* from = piece_.input + (piece_.first_example + item) * piece_.program.input_size;
    double* to = out_.of<double>(item);
    for (int64_t c = 0; c < step_.out_channels; ++c)
      for (int64_t p = first; p < last; ++p) to[p * step_.out_channels + c] = from[c * step_.positions + p];
  }

  void output(int64_t item, int64_t first, int64_t last) const {
    const int64_t samples = shared_ ? 1 : piece_.samples;
    const int64_t row = (piece_.first_sample + item % samples) * piece_.call.batch + piece_.first_example + item / samples;
    const double* from = in_.of<double>(item);
    float* to = piece_.output + row * piece_.program.output_size;
    for (int64_t c = 0; c < step_.out_channels; ++c)
      for (int64_t p = first; p < last; ++p) to[c * step_.positions + p] = static_cast<float>(from[p * step_.out_channels + c]);
  }

  void any(const uint32_t* in, uint32_t* out, int64_t first, int64_t last) const {
    const int64_t words = words_of(step_.out_channels);
    for (int64_t p = first; p < last; ++p) {
      uint32_t* to = out + p * words;
      std::fill(to, to + words, 0u);
      const int32_t list = step_.lists[p];
      for (int32_t r = step_.list_runs[list]; r < step_.list_runs[list + 1]; ++r) {
        const uint32_t* from = in + step_.bases[p] + step_.runs[r].input;
        for (int64_t w = 0; w < words; ++w) to[w] |= from[w];
      }
    }
  }

  void pool(const double* in, double* out, int64_t first, int64_t last) const {
    const int64_t channels = step_.out_channels;
    const bool maximum = step_.kind == kPackedMaximum;
    for (int64_t p = first; p < last; ++p) {
      double* to = out + p * channels;
      std::fill(to, to + channels, maximum ? -HUGE_VAL : 0.0);
      const int32_t list = step_.lists[p];
      for (int32_t r = step_.list_runs[list]; r < step_.list_runs[list + 1]; ++r) {
        const double* from = in + step_.bases[p] + step_.runs[r].input;
        if (maximum)
          for (int64_t c = 0; c < channels; ++c) to[c] = from[c] <= to[c] ? to[c] : from[c];
        else
          for (int64_t c = 0; c < channels; ++c) to[c] += from[c];
      }
      if (!maximum)
        for (int64_t c = 0; c < channels; ++c) to[c] *= step_.factor;
    }
  }

  void gather(const double* in, double* out, int64_t first, int64_t last) const {
    for (int64_t i = first * step_.out_channels; i < last * step_.out_channels; ++i)
      out[i] = step_.index[i] < 0 ? step_.factor : in[step_.index[i]];
  }

  // The index counts bits of the input's words.
  void gather_bits(const uint32_t* in, uint32_t* out, int64_t first, int64_t last) const {
    const int64_t channels = step_.out_channels, words = words_of(channels);
    const uint32_t outside = step_.factor > 0;
    for (int64_t p = first; p < last; ++p)
      for (int64_t w = 0; w < words; ++w) {
        uint32_t word = 0;
        for (int64_t c = 32 * w; c < std::min(channels, 32 * (w + 1)); ++c) {
          const int32_t from = step_.index[p * channels + c];
          word |= (from < 0 ? outside : in[from / 32] >> from % 32 & 1) << c % 32;
        }
        out[p * words + w] = word;
      }
  }

  void insert_bits(const uint32_t* in, uint32_t* out, int64_t first, int64_t last) const {
    const int64_t words_in = words_of(step_.in_channels), words_out = words_of(step_.out_channels);
    const int64_t word = step_.first / 32, by = step_.first % 32;
    for (int64_t p = first; p < last; ++p) {
      uint32_t* to = out + p * words_out;
      if (step_.first == 0) std::fill(to, to + words_out, 0u);
      for (int64_t w = 0; w < words_in; ++w) {
        const uint64_t bits = static_cast<uint64_t>(in[p * words_in + w]) << by;
        to[word + w] |= static_cast<uint32_t>(bits);
        // Nothing is left over where the next word is beyond the place.
        if (bits >> 32) to[word + w + 1] |= static_cast<uint32_t>(bits >> 32);
      }
    }
  }

  void probabilities(int64_t count, const double* a, uint32_t* out) const {
    const double scale = step_.factor;
    switch (step_.function) {
      case kPackedLogistic: return piece_.kernels.logistic(count, a, scale, out);
      case kPackedNormal:
        for (int64_t i = 0; i < count; ++i) out[i] = as_word(0.5 * std::erfc(-a[i] / scale * 0.70710678118654752440));
        return;
      case kPackedLaplace:
        for (int64_t i = 0; i < count; ++i) {
          const double tail = 0.5 * std::exp(-std::fabs(a[i] / scale));
          out[i] = as_word(a[i] > 0 ? 1 - tail : tail);
        }
        return;
      default:
        for (int64_t i = 0; i < count; ++i) out[i] = as_word(std::min(std::max(0.5 + 0.5 * a[i] / scale, 0.0), 1.0));
    }
  }
};

// The memory of a thread, or of a team: slots for some items. Those of shared steps may be another one's.
struct Slots {
  std::vector<Buffer<char>> memory;
  std::vector<char*> first;

  void allocate(const PackedProgram& program, int64_t examples, int64_t samples, const Slots* shared = nullptr) {
    memory = std::vector<Buffer<char>>(program.slots);
    for (int64_t slot = 0; slot < program.slots; ++slot) {
      if (shared != nullptr && program.slot_shared[slot]) {
        first.push_back(shared->first[slot]);
        continue;
      }
      memory[slot].allocate(program.slot_bytes[slot] * (program.slot_shared[slot] ? examples : examples * samples));
      first.push_back(memory[slot].data());
    }
  }
};

void allocate(const PackedProgram& program, Scratch& scratch) {
  int64_t integers = 0, words = 0;
  for (int64_t i = 0; i < program.count; ++i) {
    const PackedStep& step = program.steps[i];
    if (step.kind == kPackedSums) integers = std::max(integers, step.tile * 16 * blocks_of(step.out_channels));
    if (step.sign >= 0) words = std::max(words, step.tile * step.out_channels);
  }
  scratch.integers.allocate(integers);
  // Words come in blocks of 64, and are read by registers of 16.
  scratch.words.allocate(words + 2 * 64 + 16);
}

// Threads that do one step after the other together. The thread with task 0 leads; the others take tiles of the step that it
// announces, and are not waited for unless they have taken one: so it does not matter whether they come at all.
class Team {
 public:
  Team(Piece piece, Scratch* scratch, int64_t threads) : piece_(piece), scratch_(scratch), threads_(threads) {}

  // `steps` from .. to - 1, on the caller and the pool's threads.
  void work(int64_t from, int64_t to) {
    from_ = from;
    to_ = to;
    ended_ = false;
    ticket_ = 0;
    run(threads_, threads_, [](void* team, int64_t task, int64_t thread) {
      if (task == 0) static_cast<Team*>(team)->lead(thread);
      else static_cast<Team*>(team)->help(thread);
    }, this);
  }

 private:
  const Piece piece_;
  Scratch* const scratch_;
  const int64_t threads_;
  int64_t from_ = 0, to_ = 0;
  // The step that is done now, and the next of its chunks: the upper and lower 32 bits.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> ended_{false};

  static void pause(int64_t& spins) {
    // A thread that is not on a processor now may hold a chunk.
    if (++spins % 256 == 0) std::this_thread::yield();
#ifdef FLIPGRAD_X86
    else _mm_pause();
#endif
  }

  int64_t total(int64_t step) const { return piece_.items(step) * piece_.program.steps[step].positions; }

  // Places of a chunk: whole tiles, about four chunks to a thread.
  int64_t chunk_places(int64_t step) const {
    const int64_t tile = piece_.program.steps[step].tile, tiles = (total(step) + tile - 1) / tile;
    return std::max<int64_t>(1, (tiles + 4 * threads_ - 1) / (4 * threads_)) * tile;
  }

  int64_t chunks(int64_t step) const { return (total(step) + chunk_places(step) - 1) / chunk_places(step); }

  // Takes chunks of the announced step while there are any; false if there was none.
  bool take(int64_t thread) {
    bool any = false;
    for (;;) {
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      const int64_t step = static_cast<int64_t>(ticket >> 32), chunk = static_cast<int64_t>(ticket & 0xffffffffu);
      if (ended_.load(std::memory_order_acquire) || step == 0 || chunk >= chunks(step - 1)) return any;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      const int64_t places = chunk_places(step - 1), first = chunk * places;
      StepRun(piece_, step - 1, scratch_[thread]).places(first, std::min(first + places, total(step - 1)));
      done_.fetch_add(1, std::memory_order_acq_rel);
      any = true;
    }
  }

  void lead(int64_t thread) {
    for (int64_t step = from_; step < to_; ++step) {
      done_.store(0, std::memory_order_relaxed);
      ticket_.store(static_cast<uint64_t>(step + 1) << 32, std::memory_order_release);
      take(thread);
      for (int64_t spins = 0; done_.load(std::memory_order_acquire) < chunks(step);) pause(spins);
    }
    ended_.store(true, std::memory_order_release);
  }

  void help(int64_t thread) {
    for (int64_t spins = 0; !ended_.load(std::memory_order_acquire);)
      if (!take(thread)) pause(spins);
  }
};

// What a thread keeps in its slots at once: about as much as a core's own cache holds.
constexpr int64_t kPieceBytes = 512 * 1024, kMostExamples = 8, kMostSamples = 16;

struct Run {
  const PackedProgram& program;
  const PackedCall& call;
  const Kernels& kernels;
  const double* input;
  float* output;
  // Examples and samples of a piece, the first of those that threads share, and whether they then share its samples.
  int64_t examples, samples, threads = 1, first = 0;
  bool by_sample = false;
  std::vector<Slots> slots;
  std::vector<Scratch> scratch;

  Run(const PackedProgram& p, const PackedCall& c, const double* in, float* out)
      : program(p), call(c), kernels(kernels_of(c)), input(in), output(out) {
    int64_t bytes = 1;
    for (int64_t slot = 0; slot < p.slots; ++slot) bytes += p.slot_bytes[slot];
    samples = std::clamp<int64_t>(kPieceBytes / bytes, 1, std::min(c.samples, kMostSamples));
    const int64_t share = (c.batch + c.threads - 1) / c.threads;
    examples = std::clamp<int64_t>(kPieceBytes / (bytes * samples), 1, std::max<int64_t>(1, std::min(share, kMostExamples)));
  }

  Piece piece(const Slots& own, int64_t example, int64_t first_sample) const {
    return {program, call, kernels, input, output, own.first.data(), example, std::min(examples, call.batch - example),
            first_sample, std::min(samples, call.samples - first_sample)};
  }

  void execute() {
    const bool by_example = call.batch >= call.threads;
    by_sample = !by_example && call.samples >= call.threads;
    if (by_sample) samples = std::min(samples, (call.samples + call.threads - 1) / call.threads);
    const int64_t tasks = (call.batch + examples - 1) / examples;
    threads = thread_limit(call.threads, by_example ? tasks : call.threads);
    slots = std::vector<Slots>(by_example || by_sample ? threads : 1);
    scratch = std::vector<Scratch>(threads);
    for (Slots& own : slots) own.allocate(program, examples, samples, by_sample && &own != slots.data() ? slots.data() : nullptr);
    for (Scratch& own : scratch) allocate(program, own);
    if (by_example) {
      run(tasks, threads, [](void* context, int64_t task, int64_t thread) { static_cast<Run*>(context)->alone(task, thread); }, this);
    } else {
      for (first = 0; first < call.batch; first += examples) together();
    }
  }

  // One thread takes a piece through steps, from one of them on.
  void follow(const Piece& now, int64_t from, int64_t thread) {
    for (int64_t step = from; step < program.count; ++step)
      StepRun(now, step, scratch[thread]).places(0, now.items(step) * program.steps[step].positions);
  }

  // One thread takes some examples through all steps.
  void alone(int64_t task, int64_t thread) {
    for (int64_t sample = 0; sample < call.samples; sample += samples)
      follow(piece(slots[thread], task * examples, sample), sample == 0 ? 0 : program.shared, thread);
  }

  // All threads share the places of every step; or of the shared steps, and then the samples.
  void together() {
    if (by_sample) {
      Team(piece(slots[0], first, 0), scratch.data(), threads).work(0, program.shared);
      const int64_t tasks = (call.samples + samples - 1) / samples;
      run(tasks, threads, [](void* context, int64_t task, int64_t thread) {
        Run& all = *static_cast<Run*>(context);
        all.follow(all.piece(all.slots[thread], all.first, task * all.samples), all.program.shared, thread);
      }, this);
      return;
    }
    for (int64_t sample = 0; sample < call.samples; sample += samples)
      Team(piece(slots[0], first, sample), scratch.data(), threads).work(sample == 0 ? 0 : program.shared, program.count);
  }
};

}  // namespace
}  // namespace flipgrad

int flipgrad_packed_run(const PackedProgram* program, const PackedCall* call, const double* input, float* output) {
  if (call->batch == 0 || call->samples == 0) return 0;
  try {
    flipgrad::Run(*program, *call, input, output).execute();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

void flipgrad_packed_words(const PackedCall* call, int64_t sign, int64_t units, uint32_t* words) {
  std::vector<uint32_t> blocks((units + 63) / 64 * 64);
  const flipgrad::Unit unit{static_cast<uint32_t>(call->first_example), static_cast<uint32_t>(call->first_sample),
                            static_cast<uint32_t>(sign)};
  const uint32_t* made = flipgrad::kernels_of(*call).random_words(*call, unit, 0, units, blocks.data());
  std::copy(made, made + units, words);
}

int flipgrad_packed_instructions(void) { return static_cast<int>(flipgrad::best_instructions()); }
