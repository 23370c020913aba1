// What ops of several basic ops are made of.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tandem/ops.h"

namespace tandem::ops {

/// Adds basic ops one by one, whose parameters become those of the op.
class Parts {
 public:
  explicit Parts(std::string name) : op_{std::move(name), {}, {}} {}

  /// `names`: the parameters of `part` by the op's own names, in their order; empty: as they are.
  void add(const Op& part, const std::vector<std::string>& names = {});
  /// A parameter that no part reads.
  void add_parameter(ParameterSpec spec) { op_.parameters.push_back(std::move(spec)); }
  ParameterSpec& parameter(const std::string& name);
  /// Backward computes again what the parts so far give.
  void recompute() {
    for (BasicOp& part : op_.basic_ops) part.recompute = true;
  }
  Op op() && { return std::move(op_); }

 private:
  Op op_;
};

/// The collectives around a product, and how many ranks share its weight.
struct Collectives {
  std::vector<Op> before, after;
  int64_t size = 1;
};
/// Throws c10::ValueError, in the name of `op`, where the group has no name or no ranks.
Collectives collectives(const std::string& op, const TensorParallel& parallel);

/// The features of one rank. Throws c10::ValueError where they are not positive, or where ranks
/// cannot share them evenly.
int64_t share(const std::string& op, const char* name, int64_t features, int64_t ranks);

/// What becomes of the gradients of weights: the `main_grads` of a module's options, and its
/// `delay_wgrad_compute`.
template <typename Options>
Op with_gradients(Op op, const Options& options) {
  for (const auto& [weight, main_grad] : options.main_grads)
    op = op.with_main_grad(weight, main_grad);
  return options.delay_wgrad_compute ? op.with_delayed_wgrad() : op;
}

/// The parameters that none of its parts reads.
std::vector<at::Tensor> unread_parameters(const Op& op);

/// Makes "weight" and "bias" of an op parameters of their own for each part of the output features,
/// which are those of all ranks: "<name>_weight". Does nothing where there are no parts.
///
/// Throws: c10::ValueError where the parts do not sum up to out_features, have no names that
///         differ, or where ranks cannot share them evenly.
void split_parameters(Op& op, const std::vector<std::pair<std::string, int64_t>>& parts,
                      int64_t out_features, int64_t ranks);

}  // namespace tandem::ops
