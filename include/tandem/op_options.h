// Options of the library's ops, with their defaults. The signatures of the ops are built from these
// structs; docs/ops says which values each option accepts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::ops {

/// Options of rms_norm and layer_norm.
struct NormOptions {
  /// A term inside the square root.
  double eps = 1e-5;
  /// The factor is 1 + weight, else weight.
  bool zero_centered_gamma = false;
  /// Only rms_norm accepts true: x / sqrt(mean(x^2) + eps) is rounded to the dtype of x before the
  /// factor multiplies it, as in models that compute `weight * x_hat.to(x.dtype)`.
  bool rounds_before_weight = false;
};
struct L2NormalizationOptions {
  /// A term inside the square root.
  double eps = 1e-6;
};
/// Options of gated units.
struct GluOptions {
  /// a and b alternate in blocks of this many columns; 0: they are the halves of x.
  size_t glu_interleave_size = 0;
};
struct SituGluOptions {
  /// Numbers above 0 that bound the magnitudes of the two tanh factors.
  double beta1 = 4, beta2 = 25;
  size_t glu_interleave_size = 0;
};
struct ClampedSwigluOptions {
  double limit = 7, alpha = 1.702, glu_linear_offset = 1;
  size_t glu_interleave_size = 0;
};
struct ScaleOptions {
  double factor = 1;
};
struct DropoutOptions {
  /// The probability with which an element becomes zero.
  double p = 0.5;
};
struct ReshapeOptions {
  /// The sizes of y, of which one may be -1.
  std::vector<int64_t> shape = {};
};
/// Options of basic_linear: the destination and the operands of its weight's gradient.
struct BasicLinearOptions {
  /// The gradient that backward returns beside main_grad, for hooks that wait for one: none, an
  /// uninitialized tensor, or zeros.
  enum class Dummy : uint8_t { none, empty, zeros };
  /// The weight's gradient is added to the buffer main_grad, not returned.
  bool accumulate_into_main_grad = false;
  /// The weight's gradient overwrites main_grad instead.
  bool overwrite_main_grad = false;
  Dummy dummy = Dummy::none;
  /// The caller computes the weight's gradient, from operands that backward stores in the caller's
  /// buffers.
  bool delay_wgrad = false;
  /// Under a recipe, x is kept for the weight's gradient in place of its codes, and backward
  /// quantizes it once more. This saves memory where another op keeps x anyway.
  bool save_original_input = false;
};
struct GroupedLinearOptions {
  size_t num_groups = 1;
  bool bias = true;
  /// One tensor [num_groups, ...] holds the weights, or the biases, of all groups.
  bool packed_weight = false, packed_bias = false;
  /// The bias of each row is multiplied by the row's number in the extra input `scales`.
  bool scale_bias = false;
  /// These three are the options of BasicLinearOptions, for all weights.
  bool accumulate_into_main_grad = false, overwrite_main_grad = false;
  BasicLinearOptions::Dummy dummy = BasicLinearOptions::Dummy::none;
  /// The caller computes the gradients of weights, from operands that backward stores in the
  /// caller's buffers.
  bool delay_wgrad = false;
  /// y, or the gradient of x, is written into a tensor of the caller.
  bool writes_output = false, writes_grad_input = false;
};
/// Options of linear_cross_entropy and, but for the bias, of cross_entropy.
struct LinearCrossEntropyOptions {
  enum class Reduction : uint8_t { mean, sum, none };
  bool bias = false, class_weight = false;
  Reduction reduction = Reduction::mean;
  /// Rows with this target have loss 0 and no gradient.
  int64_t ignore_index = -100;
  /// The share of a target that is spread over all classes.
  double label_smoothing = 0;
  /// Logits become soft_cap tanh(logits / soft_cap); 0 leaves them unchanged.
  double soft_cap = 0;
  /// The factor of logsumexp(logits)^2 in the loss of a row.
  double z_loss = 0;
  /// The process group whose ranks share the classes in the order of ranks, by its name in
  /// torch.distributed; its size; the rank of this process. num_classes then counts this rank's
  /// classes, targets count all classes, and backward gives this rank's part of the gradient of x,
  /// which reduce_gradient sums.
  std::string group = {};
  int64_t group_size = 1, rank = 0;
};
/// Options of rotary, whose x holds (num_heads + 2 num_kv_heads) heads: queries, keys and values.
struct RotaryOptions {
  size_t num_heads = 1, head_dim = 1;
  /// Heads of keys, and of values; 0: num_heads.
  size_t num_kv_heads = 0;
  double base = 10000;
  /// The first features of each head are rotated, as many as this; 0: all.
  size_t rotated_features = 0;
  /// The features of a pair are neighbours; else their indices differ by half of the rotated
  /// features.
  bool interleaved = false;
  /// Cosines and sines of the angles are extra inputs; else positions are 0, 1, ...
  bool tables = false;
};
/// Options of modulate.
struct ModulateOptions {
  /// The factor is 1 + scale, else scale.
  bool zero_centered = true;
  /// shift is an extra input, else 0.
  bool shift = true;
};
/// Options of attention, whose x is that of RotaryOptions.
struct AttentionOptions {
  size_t num_heads = 1, head_dim = 1;
  size_t num_kv_heads = 0;
  /// No query attends to keys after it.
  bool causal = false;
  /// The factor of q k^T; 0: 1 / sqrt(head_dim).
  double scale = 0;
  /// Scores become soft_cap tanh(scores / soft_cap); 0 leaves them unchanged.
  double soft_cap = 0;
  /// The mask is an extra input that broadcasts to [..., num_heads, sequence, sequence].
  bool mask = false;
};
/// Options of qk_norm, whose x is that of RotaryOptions.
struct QkNormOptions {
  size_t num_heads = 1, num_kv_heads = 0;
  /// A term inside the square root.
  double eps = 1e-5;
  /// The factors are 1 + query_weight and 1 + key_weight, else query_weight and key_weight.
  bool zero_centered_gamma = false;
  /// head / sqrt(...) is rounded to the dtype of x before the factor multiplies it.
  bool rounds_before_weight = false;
};
/// Options of quantize, which changes nothing without a recipe.
struct QuantizeOptions {
  /// x is rounded to the recipe's format of inputs, or the gradient to its format of gradients.
  bool forward = true, backward = false;
};

}  // namespace tandem::ops
