// Builds ops that consist of several basic ops.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tandem/ops.h"

namespace tandem::ops {

/// Collects parts; the parameters of the parts become parameters of the op.
class Parts {
 public:
  explicit Parts(std::string name) : op_{std::move(name), {}, {}} {}

  /// `names` renames the parameters of `part`, in their order; empty: the names stay.
  void add(const Op& part, const std::vector<std::string>& names = {});
  /// Adds a parameter that no part reads.
  void add_parameter(ParameterSpec spec) { op_.parameters.push_back(std::move(spec)); }
  ParameterSpec& parameter(const std::string& name);
  /// Has backward recompute the parts that were added so far.
  void recompute() {
    for (BasicOp& part : op_.basic_ops) part.recompute = true;
  }
  Op op() && { return std::move(op_); }

 private:
  Op op_;
};

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

/// Splits the parameters "weight" and "bias" of an op into one for each part of the output
/// features: "<name>_weight", "<name>_bias". `out_features` and the features of parts count all
/// ranks. Does nothing where `parts` is empty.
///
/// Throws:  c10::ValueError where parts do not sum up to out_features, where their names do not
///          differ, and where ranks cannot share them evenly.
void split_parameters(Op& op, const std::vector<std::pair<std::string, int64_t>>& parts,
                      int64_t out_features, int64_t ranks);

}  // namespace tandem::ops
