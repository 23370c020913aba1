// Operations as values: what is computed, with which options and parameters. A list of them makes a
// tandem::Sequential.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "tandem/activations.h"
#include "tandem/export.h"
#include "tandem/op_options.h"
#include "tandem/options.h"

namespace tandem {

/// Writes the first values of a parameter.
using Init = std::function<void(const at::Tensor&)>;

namespace init {
TANDEM_API Init zeros();
TANDEM_API Init ones();
/// U(-1/sqrt(n), 1/sqrt(n)), n the last size.
TANDEM_API Init kaiming_uniform();
/// N(0, deviation^2).
TANDEM_API Init normal(double deviation);
}  // namespace init

/// A parameter that an op needs.
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  Init init;
  /// Another's, read as it is; undefined: whoever runs the op makes one.
  at::Tensor tensor = {};
  /// What its gradient is added to; undefined: it is returned.
  at::Tensor main_grad = {};
};

/// What an extra output writes or an extra input reads.
struct Channel {
  /// Empty: a result of the pipeline, or an argument.
  std::string name;
  /// Of an output: it is a result too.
  bool output_to_caller = true;
};

/// A registered op in an entry of a list.
struct BasicOp {
  std::string name;
  OptionValues options = {};
  /// Its parameters in the order of its definition, as places in Op::parameters.
  std::vector<size_t> parameters = {};
  /// How many of these each parameter of the definition is, one behind the other along the first
  /// dimension; empty: one each.
  std::vector<size_t> joins = {};
  /// One each, or none where all are unbound.
  std::vector<Channel> extra_inputs = {}, extra_outputs = {};
  /// The result may be written into the extra input.
  bool in_place = false;
  /// Backward computes its results again, instead of having them kept.
  bool recompute = false;
};

/// One entry of a list of operations: one or several basic ops (a linear layer is a product and a
/// bias).
struct TANDEM_API Op {
  /// "linear".
  std::string name;
  std::vector<BasicOp> basic_ops;
  std::vector<ParameterSpec> parameters = {};

  /// The same op on a tensor that is there already, as a parameter of its shape: ops that are given
  /// one share it, in one pipeline and in several. It stays the parameter of the module that has
  /// registered it and of no other, so that an optimizer meets it once.
  ///
  ///   ops::linear(hidden, vocabulary, {.bias = false}).with_parameter("weight", embedding->weight)
  ///
  /// Throws: c10::ValueError where there is no such parameter, or where the tensor has another
  ///         shape, is undefined or no leaf.
  Op with_parameter(const std::string& parameter, at::Tensor tensor) const;

  /// The same op, whose gradient of a weight is added to `main_grad` in the product itself, and is
  /// not in `grad()`. Who trains sets `main_grad` to zero.
  ///
  /// The weights of a grouped_linear have one each, or none of them has.
  ///
  /// Throws: c10::ValueError where there is no such parameter, where it is not the weight of a
  ///         product, or where `main_grad` has another shape, is undefined or requires grad.
  Op with_main_grad(const std::string& parameter, at::Tensor main_grad) const;

  /// The same op, whose backward leaves the gradients of its products' weights to `backward_dw()`
  /// of the module: a pipeline schedule computes them while it would wait.
  ///
  /// Throws: c10::ValueError where the op has no product.
  Op with_delayed_wgrad() const;
};

/// How ranks share the weight of a linear layer. Sizes of ops are those of all ranks.
struct TensorParallel {
  enum class Mode : uint8_t {
    none,
    /// Each rank holds a part of the output features, and gives these.
    column,
    /// Each rank holds a part of the input features. The bias of ops::linear is a term of the sum
    /// over ranks, that of the modules is added behind it, as in TransformerEngine.
    row,
  };
  Mode mode = Mode::none;
  /// The process group, by the name that torch.distributed or c10d::register_process_group knows it
  /// by, and the ranks in it.
  std::string group = {};
  int64_t size = 1;
  /// The ranks share the first dimension outside: x is gathered before a column-parallel product, y
  /// scattered behind a row-parallel one.
  bool sequence_parallel = false;
};

namespace ops {

/// The registered op of this name, one's own too: docs/ops says the sizes and options of those
/// of the library.
///
///   tandem::ops::op("rms_norm", {{"hidden", 64}}, {{"eps", 1e-6}})
///
/// Throws: c10::ValueError for a name that is not registered; for sizes that are not those of its
///         parameters, or not positive; for an option that is unknown or not as its check says.
TANDEM_API Op op(const std::string& name,
                 const std::vector<std::pair<std::string, int64_t>>& sizes = {},
                 const OptionValues& options = {});

/// The options that the op's own struct holds; `options` is one of type `type`.
///
/// Throws: c10::TypeError where it is another struct than that of the op's signature.
TANDEM_API OptionValues option_values(const std::string& name, const std::type_info& type,
                                      const void* options);

/// The same with the struct that the op's signature is made of.
///
///   tandem::ops::op("shifted_relu", {}, ShiftOptions{.shift = 0.5})
///
/// Throws: as above, and as option_values.
template <typename Options>
Op op(const std::string& name, const std::vector<std::pair<std::string, int64_t>>& sizes,
      const Options& options) {
  return op(name, sizes, option_values(name, typeid(Options), &options));
}

struct LinearOptions {
  bool bias = true;
  TensorParallel tensor_parallel = {};
  /// The output features as parts, in order: a name and the features of each, of all ranks. Each
  /// has parameters of its own, "<name>_weight" and "<name>_bias", that run as one product; they
  /// are made in one memory, so that joining them copies nothing. Empty: "weight" and "bias".
  std::vector<std::pair<std::string, int64_t>> parameters_split = {};
  /// As BasicLinearOptions::save_original_input.
  bool save_original_input = false;
};
/// y = x W^T + b. W [out_features, in_features] starts as torch.nn.Linear's does, b [out_features]
/// at zero.
///
/// Throws: c10::ValueError where features are not positive, where ranks cannot share them evenly,
///         and where the parts do not sum up to out_features or have no names that differ.
TANDEM_API Op linear(int64_t in_features, int64_t out_features, const LinearOptions& options = {});

/// y_g = x_g W_g^T + b_g for the rows of each group; the extra input says how many each has:
/// integers [num_groups]. Parameters "weight0", ..., "bias0", ..., or "weight" and "bias" where
/// they are packed.
TANDEM_API Op grouped_linear(int64_t in_features, int64_t out_features,
                             const GroupedLinearOptions& options = {});

/// The cross entropy of x weight^T + bias and the targets, an extra input of int64 [...] for x
/// [..., in_features], without memory for these logits: one loss, or with Reduction::none one for
/// each row, in float32 (float64 where weight is). Parameters "weight" [num_classes, in_features],
/// and where options say so "bias" and "class_weight" [num_classes], the factor of the losses of
/// each class, which starts at one and gets no gradient.
///
///   Sequential head({ops::rms_norm(hidden), ops::linear_cross_entropy(hidden, vocabulary)});
///   head->forward(x, {targets}).backward();
TANDEM_API Op linear_cross_entropy(int64_t in_features, int64_t num_classes,
                                   const LinearCrossEntropyOptions& options = {});
/// The same, and as extra output the class of the largest logit of each row, int64.
TANDEM_API Op linear_cross_entropy_with_predictions(int64_t in_features, int64_t num_classes,
                                                    const LinearCrossEntropyOptions& options = {});

/// y = x * (1 + scale) + shift, rounded once. The extra inputs scale and shift broadcast to x and
/// get gradients of their own shapes: [batch, 1, hidden] for adaptive norms, [hidden] for the scale
/// of a layer. c10::ValueError at the call for other shapes.
///
///   Sequential block({ops::layer_norm(64), ops::modulate(), ops::linear(64, 64),
///                     ops::modulate({.zero_centered = false, .shift = false})});
///   block->forward(x, {scale, shift, gate});
TANDEM_API Op modulate(const ModulateOptions& options = {});

/// x holds queries, keys and values as one product makes them, [..., sequence, (num_heads +
/// 2 num_kv_heads) head_dim]; queries and keys are turned by the angles of their positions.
TANDEM_API Op rotary(const RotaryOptions& options);
/// y [..., sequence, num_heads head_dim] of the same x: softmax(scale q k^T) v, head by head.
///
///   Sequential({ops::linear(64, 96), ops::rotary({.num_heads = 4, .head_dim = 16,
///                                                 .num_kv_heads = 1}),
///               ops::attention({.num_heads = 4, .head_dim = 16, .num_kv_heads = 1,
///                               .causal = true}), ops::linear(64, 64)});
TANDEM_API Op attention(const AttentionOptions& options);
/// y like the same x, between the product and `rotary`: head / sqrt(mean(head^2) + eps) * weight
/// for each head of queries and keys; values stay. Parameters "query_weight" and "key_weight"
/// [head_dim], which start as that of rms_norm.
///
///   Sequential({ops::linear(64, 96), ops::qk_norm(16, {.num_heads = 4, .num_kv_heads = 1}),
///               ops::rotary({.num_heads = 4, .head_dim = 16, .num_kv_heads = 1})});
TANDEM_API Op qk_norm(int64_t head_dim, const QkNormOptions& options);

/// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, which has `hidden` elements.
TANDEM_API Op rms_norm(int64_t hidden, const NormOptions& options = {});
/// y = (x - mean) / sqrt(variance + eps) * weight + bias.
///
/// Throws: c10::ValueError where it is to round before its weight, as rms_norm alone may.
TANDEM_API Op layer_norm(int64_t hidden, const NormOptions& options = {});
/// The same over the last dimensions, as many as `normalized_shape` has.
///
/// Throws: as above, and c10::ValueError unless it has one size at least, and all are positive.
TANDEM_API Op rms_norm(const std::vector<int64_t>& normalized_shape,
                       const NormOptions& options = {});
TANDEM_API Op layer_norm(const std::vector<int64_t>& normalized_shape,
                         const NormOptions& options = {});
/// y = x / sqrt(sum(x^2) + eps) over the last dimension.
TANDEM_API Op l2_normalization(const L2NormalizationOptions& options = {});
/// The rows of tandem/activations.h: gelu(), swiglu() and so on.
#define TANDEM_FUNCTION(name, ...) TANDEM_API Op name();
TANDEM_ACTIVATIONS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION
#define TANDEM_FUNCTION(name, ...) TANDEM_API Op name(const GluOptions& options = {});
TANDEM_GATED_UNITS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION
/// y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), [a, b] = x.
TANDEM_API Op situglu(const SituGluOptions& options = {});
/// y = a' sigmoid(alpha a') (b' + glu_linear_offset), [a, b] = x, a' = min(a, limit), b' = b
/// between -limit and limit.
TANDEM_API Op clamped_swiglu(const ClampedSwigluOptions& options = {});
/// The same times a number per row of x, which is the extra input "scales" of the shape of x
/// without its last dimension.
TANDEM_API Op scaled_swiglu(const GluOptions& options = {});
TANDEM_API Op scaled_situglu(const SituGluOptions& options = {});
TANDEM_API Op scaled_clamped_qgeglu(const ClampedSwigluOptions& options = {});
TANDEM_API Op scaled_srelu();
/// y = x.
TANDEM_API Op identity();
/// In training, zero with probability p, else x / (1 - p).
TANDEM_API Op dropout(const DropoutOptions& options = {});
/// y = x * factor.
TANDEM_API Op constant_scale(double factor);
/// y = x.reshape(shape); one size may be -1.
TANDEM_API Op reshape(std::vector<int64_t> shape);
/// Under a recipe: x rounded to the format of inputs, the gradient to that of gradients.
TANDEM_API Op quantize(const QuantizeOptions& options = {});
/// y = x, and x is an extra output: bound to a channel, returned to the caller, or both. Without a
/// channel it is always returned.
TANDEM_API Op make_extra_output(const Channel& channel = {});

struct AddExtraInputOptions {
  /// Empty: the caller passes the extra input.
  std::string channel = {};
  /// The sum is written into the caller's tensor.
  bool in_place = false;
};
/// y = x + extra.
TANDEM_API Op add_extra_input(const AddExtraInputOptions& options = {});

}  // namespace ops
}  // namespace tandem
