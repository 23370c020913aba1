// Options of the ops of the library, with their defaults. Signatures of ops are made of them: what
// each may be set to is in docs/ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::ops {

/// Of rms_norm and layer_norm.
struct NormOptions {
  /// Added inside the square root.
  double eps = 1e-5;
  /// The factor is 1 + weight.
  bool zero_centered_gamma = false;
  /// Of rms_norm alone: x / sqrt(mean(x^2) + eps) is rounded to the dtype of x before it is
  /// multiplied with the factor, as models do that write `weight * x_hat.to(x.dtype)`.
  bool rounds_before_weight = false;
};
struct L2NormalizationOptions {
  /// Added inside the square root.
  double eps = 1e-6;
};
/// Of gated units.
struct GluOptions {
  /// a and b take turns in blocks of so many columns; 0: they are halves.
  size_t glu_interleave_size = 0;
};
struct SituGluOptions {
  /// Above 0: what the factors are kept below in size.
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
  /// The share that becomes zero.
  double p = 0.5;
};
struct ReshapeOptions {
  /// One size may be -1.
  std::vector<int64_t> shape = {};
};
/// Of basic_linear: what becomes of its weight's gradient, and what that is made of.
struct BasicLinearOptions {
  /// What the parameter asks to be given instead, so that whoever waits for a gradient wakes up:
  /// nothing, anything, zeros.
  enum class Dummy : uint8_t { none, empty, zeros };
  /// It is added to the buffer main_grad, not returned.
  bool accumulate_into_main_grad = false;
  /// It takes the place of what main_grad holds.
  bool overwrite_main_grad = false;
  Dummy dummy = Dummy::none;
  /// It is left to the caller, who is given its operands.
  bool delay_wgrad = false;
  /// Under a recipe: x is kept as it is for it, and quantized again in backward. Saves memory where
  /// somebody else keeps x anyway.
  bool save_original_input = false;
};
struct GroupedLinearOptions {
  size_t num_groups = 1;
  bool bias = true;
  /// One tensor [num_groups, ...] for all groups.
  bool packed_weight = false, packed_bias = false;
  /// The bias of each row is multiplied by its number among the extra input `scales`.
  bool scale_bias = false;
  /// As of basic_linear, of all weights.
  bool accumulate_into_main_grad = false, overwrite_main_grad = false;
  BasicLinearOptions::Dummy dummy = BasicLinearOptions::Dummy::none;
  /// The gradients of weights are left to the caller, who is given their operands.
  bool delay_wgrad = false;
  /// y, and the gradient of x, are written into tensors of the caller.
  bool writes_output = false, writes_grad_input = false;
};
/// Of linear_cross_entropy.
struct LinearCrossEntropyOptions {
  enum class Reduction : uint8_t { mean, sum, none };
  bool bias = false, class_weight = false;
  Reduction reduction = Reduction::mean;
  /// Rows with this target have loss 0 and no gradient.
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  /// Logits become soft_cap tanh(logits / soft_cap); 0: they stay.
  double soft_cap = 0;
  /// The factor of logsumexp(logits)^2 in the loss of a row.
  double z_loss = 0;
  /// The process group, by its name in torch.distributed, whose ranks share the classes in the
  /// order of ranks, how many it has, and which of them this process is. num_classes are then this
  /// rank's, targets count all, and the gradient of x is the part of this rank's classes
  /// (reduce_gradient sums it).
  std::string group;
  int64_t group_size = 1, rank = 0;
};
/// Of rotary. x holds queries, keys and values side by side, (num_heads + 2 num_kv_heads) heads.
struct RotaryOptions {
  size_t num_heads = 1, head_dim = 1;
  /// Heads of keys, and of values; 0: num_heads.
  size_t num_kv_heads = 0;
  double base = 10000;
  /// The first features of each head are turned; 0: all.
  size_t rotated_features = 0;
  /// The features of a pair are neighbours, not half of what is turned apart.
  bool interleaved = false;
  /// Cosines and sines of the angles are extra inputs; else positions are 0, 1, ...
  bool tables = false;
};
/// Of modulate.
struct ModulateOptions {
  /// The factor is 1 + scale; else it is scale.
  bool zero_centered = true;
  /// An extra input; else it is 0.
  bool shift = true;
};
/// Of attention, on the same x.
struct AttentionOptions {
  size_t num_heads = 1, head_dim = 1;
  size_t num_kv_heads = 0;
  /// No query sees keys behind it.
  bool causal = false;
  /// 0: 1 / sqrt(head_dim).
  double scale = 0;
  /// Scores become soft_cap tanh(scores / soft_cap); 0: they stay.
  double soft_cap = 0;
  /// An extra input that broadcasts to [..., num_heads, sequence, sequence].
  bool mask = false;
};
/// Of qk_norm, on the same x.
struct QkNormOptions {
  size_t num_heads = 1, num_kv_heads = 0;
  /// Added inside the square root.
  double eps = 1e-5;
  /// The factors are 1 + query_weight and 1 + key_weight.
  bool zero_centered_gamma = false;
  /// head / sqrt(...) is rounded to the dtype of x before it is multiplied.
  bool rounds_before_weight = false;
};
/// Under a recipe.
struct QuantizeOptions {
  /// x is rounded to the format of inputs, the gradient to that of gradients.
  bool forward = true, backward = false;
};

}  // namespace tandem::ops
