// The separable flip product of a fully connected layer: entry point, and the split over threads.
//
// A matrix product by blocks (Goto, van de Geijn. Anatomy of high-performance matrix multiplication. 2008) whose second factor,
// the functions of the weights, is never in memory as a whole.
#include <algorithm>
#include <cstdint>
#include <new>

#include "buffer.h"
#include "flipgrad.h"
#include "pool.h"
#include "targets.h"

namespace flipgrad {
namespace {

// Terms that are added in registers before they go to the result. A panel with this many rows fills half of a first-level cache.
constexpr int64_t kDepth = 256;

// Rows of a tile, and of all the tiles that a panel is multiplied with before it is the next one's turn: their features are in
// a second-level cache, together with the functions of as many columns as a block has at most.
constexpr int64_t kTileRows = 6, kRowsAtOnce = 43 * kTileRows, kMostColumns = 128;

// The least rows and columns of a block: with fewer, functions are computed and features read too often.
constexpr int64_t kLeastRows = 8 * kTileRows, kLeastColumns = 32;

// Rows of weights that are prefetched.
constexpr int64_t kRowsAhead = 8;

// Blocks for every thread, so that all are done at about the same time.
constexpr int64_t kBlocksPerThread = 4;

struct Product {
  const ProductProblem& problem;
  const float *difference, *curvature, *weight, *x;
  float* u;
  int64_t rows, columns, column_blocks;
  // [function, depth / kDepth, batch, kDepth]
  float* features;
  // [thread, kDepth, columns]
  float* panels;
};

// The part of the result that one task computes.
struct Block {
  int64_t row, rows, column, columns;
};

int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

#define FLIPGRAD_WITH_AVX512
#define FLIPGRAD_KERNELS "product_kernels.inc"
#include "for_each_target.inc"

// The features of one example, in pieces of kDepth.
void some_features(void* context, int64_t row, int64_t) {
  const Product& product = *static_cast<Product*>(context);
  const ProductProblem& p = product.problem;
  float* to = product.features + row * kDepth;
  for (int64_t function = 0; function < p.differences + p.curvatures; ++function) {
    const float* from = function < p.differences ? product.difference + (row * p.differences + function) * p.out
                                           : product.curvature + (row * p.curvatures + function - p.differences) * p.out;
    for (int64_t first = 0; first < p.out; first += kDepth, to += p.batch * kDepth) {
      std::copy(from + first, from + std::min(first + kDepth, p.out), to);
    }
  }
}

void some_products(void* context, int64_t task, int64_t thread) {
  const Product& product = *static_cast<Product*>(context);
  const ProductProblem& p = product.problem;
  const FlushToZero flush;
  const int64_t row = task / product.column_blocks * product.rows, column = task % product.column_blocks * product.columns;
  const Block block{row, std::min(product.rows, p.batch - row), column, std::min(product.columns, p.in - column)};
  const auto compute = FLIPGRAD_BEST(p.portable, multiply_block);
  compute(product, block, product.panels + thread * kDepth * product.columns);
}

void multiply(const ProductProblem& p, const float* difference, const float* curvature, const float* weight, const float* x, float* u) {
  int64_t rows = std::max<int64_t>(p.batch, 1), columns = kMostColumns;
  const auto tasks = [&] { return ceil_div(p.batch, rows) * ceil_div(p.in, columns); };
  const auto too_few = [&] { return tasks() < kBlocksPerThread * p.threads; };
  while (p.threads > 1 && columns > kLeastColumns && too_few()) columns /= 2;
  while (p.threads > 1 && rows > kLeastRows && too_few()) rows = ceil_div(rows, 2 * kTileRows) * kTileRows;
  Buffer<float> features, panels;
  features.allocate((p.differences + p.curvatures) * ceil_div(p.out, kDepth) * p.batch * kDepth);
  panels.allocate(thread_limit(p.threads, tasks()) * kDepth * columns);
  Product product{p, difference, curvature, weight, x, u, rows, columns, ceil_div(p.in, columns), features.data(), panels.data()};
  run(p.batch, p.threads, some_features, &product);
  run(tasks(), p.threads, some_products, &product);
}

}  // namespace
}  // namespace flipgrad

int flipgrad_product_f32(const ProductProblem* problem, const float* difference, const float* curvature, const float* weight, const float* x,
                         float* u) {
  try {
    flipgrad::multiply(*problem, difference, curvature, weight, x, u);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

int flipgrad_has_fast_products(void) {
  using namespace flipgrad;
  return has_avx512() ? has_avx512_popcount() : has_avx2();
}
