// Builds ops that consist of several basic ops.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tandem/ops.h"

namespace tandem::ops {

/// Adds the basic ops and the parameters of `part` to `whole`. `names` renames these parameters, in
/// their order; empty: the names stay.
void append(Op& whole, const Op& part, const std::vector<std::string>& names = {});

/// The collectives before and after a product, and the number of ranks that share its weight.
struct Collectives {
  std::vector<Op> before, after;
  int64_t size = 1;
};
/// Throws c10::ValueError, in the name of `op`, where the group has no name or no ranks.
Collectives collectives(const std::string& op, const TensorParallel& parallel);

/// Returns the features of one rank. Throws c10::ValueError where `features` is not positive or
/// ranks cannot share it evenly.
int64_t share(const std::string& op, const char* name, int64_t features, int64_t ranks);

/// Applies the options `main_grads` and `delay_wgrad_compute` of a module to its op.
template <typename Options>
Op with_gradients(Op op, const Options& options) {
  for (const auto& [weight, main_grad] : options.main_grads)
    op = op.with_main_grad(weight, main_grad);
  return options.delay_wgrad_compute ? op.with_delayed_wgrad() : op;
}

/// Returns the parameters that no basic op reads.
std::vector<at::Tensor> unread_parameters(const Op& op);

}  // namespace tandem::ops
