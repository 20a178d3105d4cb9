// The log ratio of a fully connected layer by one product (flips/one_product.py), logistic noise: its parts one after the other.
#include <cstdint>
#include <new>

#include "buffer.h"
#include "flipgrad.h"

int flipgrad_one_product_f32(const OneProductProblem* problem, const float* weight, const float* a, const float* states, const float* x,
                             float* log_ratio) {
  using namespace flipgrad;
  const OneProductProblem& p = *problem;
  const NodeProblem nodes{p.outputs, p.inputs, 1, p.threads, p.portable};
  const RankOneProblem rows{p.batch, p.outputs, 1, 1, 1, 0, p.scale, p.threads, p.portable};
  const float one = 1.0f;
  const ProductProblem product{p.batch, p.inputs, p.outputs, 1, 0, 1, &one, 1.0, p.threads, p.portable};
  try {
    Buffer<float> node, scaled, per_input, odd, spread;
    node.allocate(p.outputs);
    scaled.allocate(p.outputs * p.inputs);
    per_input.allocate(p.inputs);
    odd.allocate(p.batch * p.outputs);
    spread.allocate(p.batch);
    int status = flipgrad_nodes_f32(&nodes, weight, node.data(), scaled.data(), per_input.data());
    if (status != 0) return status;
    for (int64_t j = 0; j < p.outputs; ++j) node.data()[j] *= 2;
    status = flipgrad_log_rows_f32(&rows, a, states, node.data(), odd.data(), spread.data());
    if (status != 0) return status;
    status = flipgrad_product_f32(&product, odd.data(), nullptr, scaled.data(), x, log_ratio);
    if (status != 0) return status;
    for (int64_t example = 0; example < p.batch; ++example) {
      const float total = spread.data()[example];
      const float* per = per_input.data();
      const float* units = x + example * p.inputs;
      float* sums = log_ratio + example * p.inputs;
      // The product is times x twice. A zero is no unit.
      for (int64_t i = 0; i < p.inputs; ++i) sums[i] = (sums[i] + total * per[i] * units[i]) * units[i];
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
