// Operations as values: a kind, its options, the parameters it will get. A list of them makes a
// tandem::Sequential.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tandem/activations.h"
#include "tandem/export.h"
#include "tandem/options.h"

namespace tandem {

/// A parameter that an op needs.
struct ParameterSpec {
  enum class Init : unsigned char {
    zeros,
    ones,
    /// U(-1/sqrt(in), 1/sqrt(in)).
    kaiming_uniform
  };
  std::string name;
  std::vector<int64_t> shape;
  Init init = Init::zeros;
};

/// One entry of a list of operations: one or several basic ops (a linear layer is a product and a
/// bias).
struct Op {
  /// "linear".
  std::string name;
  /// As JSON: entries of a description, parameters numbered from 0.
  std::string basic_ops;
  std::vector<ParameterSpec> parameters;
};

namespace ops {

/// The registered op of this name, one's own too: docs/ops.md says the sizes and options of those
/// of the library.
///
///   tandem::ops::op("rms_norm", {{"hidden", 64}}, {{"eps", 1e-6}})
///
/// Throws: c10::ValueError for a name that is not registered; for sizes that are not those of its
///         parameters, or not positive; for an option that is unknown or not as its check says.
TANDEM_API Op op(const std::string& name,
                 const std::vector<std::pair<std::string, int64_t>>& sizes = {},
                 const OptionValues& options = {});

/// y = x W^T + b. W [out_features, in_features] and b [out_features] start as torch.nn.Linear's W
/// does, and at zero.
TANDEM_API Op linear(int64_t in_features, int64_t out_features, bool bias = true);
/// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, which has `hidden` elements.
TANDEM_API Op rms_norm(int64_t hidden, double eps = 1e-5, bool zero_centered_gamma = false);
/// y = (x - mean) / sqrt(variance + eps) * weight + bias.
TANDEM_API Op layer_norm(int64_t hidden, double eps = 1e-5, bool zero_centered_gamma = false);
/// The rows of tandem/activations.h: gelu(), swiglu() and so on.
#define TANDEM_FUNCTION(name, ...) TANDEM_API Op name();
TANDEM_ACTIVATIONS(TANDEM_FUNCTION)
TANDEM_GATED_UNITS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION
/// y = x.
TANDEM_API Op identity();
/// In training, zero with probability p, else x / (1 - p).
TANDEM_API Op dropout(double p = 0.5);
/// y = x * factor.
TANDEM_API Op constant_scale(double factor);
/// y = x.reshape(shape); one size may be -1.
TANDEM_API Op reshape(std::vector<int64_t> shape);
/// Under a recipe: x rounded to the format of inputs, the gradient to that of gradients.
TANDEM_API Op quantize(bool forward = true, bool backward = false);
/// y = x, and x is an extra output: bound to a channel, returned to the caller, or both. Without a
/// channel it is always returned.
TANDEM_API Op make_extra_output(std::string channel = "", bool output_to_caller = true);
/// y = x + extra, from a channel or, without one, from the caller. `in_place` writes the sum into
/// the caller's tensor.
TANDEM_API Op add_extra_input(std::string channel = "", bool in_place = false);

}  // namespace ops
}  // namespace tandem
