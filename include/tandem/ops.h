// Operations as values that hold options and parameters. A list of them makes a tandem::Sequential.
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

/// A function that writes the first values of a parameter.
using Init = std::function<void(const at::Tensor&)>;

namespace init {
TANDEM_API Init zeros();
TANDEM_API Init ones();
/// Draws from U(-1/sqrt(n), 1/sqrt(n)), where n is the size of the last dimension.
TANDEM_API Init kaiming_uniform();
/// Draws from N(0, deviation^2).
TANDEM_API Init normal(double deviation);
}  // namespace init

/// A parameter of an op.
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  Init init;
  /// An existing tensor that serves as the parameter; undefined: the module of the op creates one.
  at::Tensor tensor = {};
  /// A tensor to which backward adds the gradient; undefined: backward returns the gradient.
  at::Tensor main_grad = {};
};

/// The target of an extra output, or the origin of an extra input.
struct Channel {
  /// The channel's name; empty: a result, or an argument, of the pipeline.
  std::string name;
  /// An extra output with a channel is a result of the pipeline too.
  bool output_to_caller = true;
};

/// A registered op with the parameters that it reads.
struct BasicOp {
  std::string name;
  OptionValues options = {};
  /// Indices into Op::parameters, in the order of the definition's parameters.
  std::vector<size_t> parameters = {};
  /// For each parameter of the definition the number of these indices whose tensors form it, joined
  /// along the first dimension; empty: one index each.
  std::vector<size_t> joins = {};
  /// One channel for each extra input and output, or none where no channel is used.
  std::vector<Channel> extra_inputs = {}, extra_outputs = {};
  /// The result may be written into the memory of the extra input.
  bool in_place = false;
  /// Backward recomputes the results, so that forward need not keep them.
  bool recompute = false;
};

/// One entry of a list of ops: one or several basic ops, such as the product and the bias of a
/// linear layer.
struct TANDEM_API Op {
  /// A name such as "linear", which messages show.
  std::string name;
  std::vector<BasicOp> basic_ops;
  std::vector<ParameterSpec> parameters = {};

  /// Returns the op with an existing tensor as a parameter. Ops with the same tensor share it,
  /// within a pipeline and between pipelines. Only the module that registered the tensor lists it
  /// as a parameter, so that an optimizer gets it once.
  ///
  ///   ops::linear(hidden, vocabulary, {.bias = false}).with_parameter("weight", embedding->weight)
  ///
  /// Shapes:  `tensor` has the shape of the parameter.
  /// Throws:  c10::ValueError where the op has no such parameter, and where the tensor has another
  ///          shape, is undefined or is no leaf.
  Op with_parameter(const std::string& parameter, at::Tensor tensor) const;

  /// Returns the op with a destination for a weight's gradient: the product itself adds the
  /// gradient to `main_grad`, and `grad()` of the weight stays unchanged. The training loop sets
  /// `main_grad` to zero. Either all weights of a grouped_linear have a main_grad, or none has.
  ///
  /// Shapes:  `main_grad` has the shape of the weight.
  /// Throws:  c10::ValueError where the op has no such parameter, where the parameter is no weight
  ///          of a product, and where `main_grad` has another shape, is undefined or requires grad.
  Op with_main_grad(const std::string& parameter, at::Tensor main_grad) const;

  /// Returns the op with a backward that leaves the gradients of its products' weights to
  /// `backward_dw()` of the module, so that a pipeline schedule can compute them while it waits.
  ///
  /// Throws:  c10::ValueError where the op has no product.
  Op with_delayed_wgrad() const;
};

/// How ranks share the weight of a linear layer. Ops take the sizes of all ranks together.
struct TensorParallel {
  enum class Mode : uint8_t {
    none,
    /// Each rank holds a part of the output features, and y has only this part.
    column,
    /// Each rank holds a part of the input features. ops::linear adds the bias on each rank before
    /// the sum over ranks; the modules add it after the sum, as TransformerEngine does.
    row,
  };
  Mode mode = Mode::none;
  /// The name by which torch.distributed or c10d::register_process_group knows the process group,
  /// and the number of its ranks.
  std::string group = {};
  int64_t size = 1;
  /// Ranks share the first dimension of tensors outside the layer: x is gathered before a
  /// column-parallel product, y is scattered after a row-parallel one.
  bool sequence_parallel = false;
};

namespace ops {

/// Returns an op by its registered name, which may be a name that the caller registered. docs/ops
/// lists the sizes and options of the library's ops.
///
///   tandem::ops::op("rms_norm", {{"hidden", 64}}, {{"eps", 1e-6}})
///
/// Throws:  c10::ValueError for an unknown name; for sizes that the definition does not have, that
///          are missing or not positive; for an unknown option or a value that its check refuses.
///          c10::NotImplementedError for an op whose parameters are a list, such as grouped_linear.
TANDEM_API Op op(const std::string& name,
                 const std::vector<std::pair<std::string, int64_t>>& sizes = {},
                 const OptionValues& options = {});

/// Converts `options`, a struct of type `type`, to the options of the op `name`.
///
/// Throws:  c10::TypeError where the op's signature is built from another struct.
TANDEM_API OptionValues option_values(const std::string& name, const std::type_info& type,
                                      const void* options);

/// Returns an op by its registered name, with the struct of options that its signature is built
/// from.
///
///   tandem::ops::op("shifted_relu", {}, ShiftOptions{.shift = 0.5})
///
/// Throws:  as `op` without a struct, and as option_values.
template <typename Options>
Op op(const std::string& name, const std::vector<std::pair<std::string, int64_t>>& sizes,
      const Options& options) {
  return op(name, sizes, option_values(name, typeid(Options), &options));
}

struct LinearOptions {
  bool bias = true;
  TensorParallel tensor_parallel = {};
  /// Parts of the output features, in order: the name of each part and its features on all ranks.
  /// Each part has parameters "<name>_weight" and "<name>_bias". One product computes all parts;
  /// the parameters of the parts are created in one memory, so that joining them copies nothing.
  /// Empty: the parameters are "weight" and "bias".
  std::vector<std::pair<std::string, int64_t>> parameters_split = {};
  /// BasicLinearOptions::save_original_input.
  bool save_original_input = false;
};
/// y = x W^T + b. W starts with the values of torch.nn.Linear, b with zeros.
///
/// Shapes:  x [..., in_features], W [out_features, in_features], b [out_features] -> y [...,
///          out_features], where ranks share either number of features as options.tensor_parallel
///          says.
/// Dtypes:  y has the dtype of torch.autocast, else of the weight.
/// Throws:  c10::ValueError where features are not positive, where ranks cannot share them evenly,
///          and where parts do not sum up to out_features or have names that do not differ.
TANDEM_API Op linear(int64_t in_features, int64_t out_features, const LinearOptions& options = {});

/// y_g = x_g W_g^T + b_g, where x_g are the rows of group g. The extra input `splits` holds the
/// number of rows of each group. Parameters "weight0", ..., "bias0", ..., or "weight" and "bias"
/// where they are packed.
///
/// Shapes:  x [..., in_features], splits [num_groups], W_g [out_features, in_features], b_g
///          [out_features] -> y [..., out_features].
/// Dtypes:  splits integers; y has the dtype of torch.autocast, else of the weights.
/// Throws:  c10::ValueError where sizes are not positive, and for a value that an option's check
///          refuses.
TANDEM_API Op grouped_linear(int64_t in_features, int64_t out_features,
                             const GroupedLinearOptions& options = {});

/// y = the mean or the sum of the cross entropy of x weight^T + bias and the extra input `targets`,
/// or, with Reduction::none, the loss of each row. The logits of all rows are never in memory
/// together. Parameters "weight", and where the options have them "bias" and "class_weight", the
/// factors of the losses of the classes. class_weight starts with ones and gets no gradient.
///
///   Sequential head({ops::rms_norm(hidden), ops::linear_cross_entropy(hidden, vocabulary)});
///   head->forward(x, {targets}).backward();
///
/// Shapes:  x [..., in_features], targets [...], weight [num_classes, in_features], bias and
///          class_weight [num_classes] -> y [], with Reduction::none [...].
/// Dtypes:  targets int64; y float32, float64 where weight is.
/// Throws:  c10::ValueError where sizes are not positive, and for a value that an option's check
///          refuses.
TANDEM_API Op linear_cross_entropy(int64_t in_features, int64_t num_classes,
                                   const LinearCrossEntropyOptions& options = {});
/// linear_cross_entropy whose extra output `predictions` is the class of the largest logit of each
/// row.
///
/// Shapes:  as linear_cross_entropy; predictions [...].
/// Dtypes:  as linear_cross_entropy; predictions int64.
TANDEM_API Op linear_cross_entropy_with_predictions(int64_t in_features, int64_t num_classes,
                                                    const LinearCrossEntropyOptions& options = {});
/// y = mean of cross_entropy(x, targets): the loss of logits, with the extra input `targets`.
/// Forward computes the gradient of x too, in one pass over the logits. Parameter "class_weight" as
/// in linear_cross_entropy.
///
/// Shapes:  x [..., num_classes], targets [...] -> y [], with Reduction::none [...].
/// Dtypes:  targets int64; y float32, float64 where x is.
/// Throws:  c10::ValueError where num_classes is not positive, for a bias, and for a value that an
///          option's check refuses.
TANDEM_API Op cross_entropy(int64_t num_classes, const LinearCrossEntropyOptions& options = {});

/// y = x * (1 + scale) + shift, rounded once, with the extra inputs scale and shift: [batch, 1,
/// hidden] for adaptive norms, [hidden] for the scale of a layer.
///
///   Sequential block({ops::layer_norm(64), ops::modulate(), ops::linear(64, 64),
///                     ops::modulate({.zero_centered = false, .shift = false})});
///   block->forward(x, {scale, shift, gate});
///
/// Shapes:  x [..., hidden]; scale and shift broadcast to x -> y like x; each gradient has the
///          shape of its operand.
/// Dtypes:  y has the dtype to which torch promotes the operands.
/// Throws:  c10::ValueError in a call with other shapes.
/// Source:  Peebles and Xie 2022, arXiv:2212.09748; without shift Touvron et al. 2021,
///          arXiv:2103.17239.
TANDEM_API Op modulate(const ModulateOptions& options = {});

/// Rotates queries and keys by the angles of their positions (rotary position embedding); values
/// stay. x is the result of one product: queries, keys and values side by side.
///
/// Shapes:  x [..., sequence, (num_heads + 2 num_kv_heads) head_dim] -> y like x; with
///          options.tables the extra inputs cosines and sines broadcast to [..., sequence,
///          rotated_features].
/// Dtypes:  y has the dtype of x.
/// Source:  Su et al. 2021, arXiv:2104.09864.
TANDEM_API Op rotary(const RotaryOptions& options);
/// y = softmax(scale q k^T) v, head by head, with the queries, keys and values of x side by side.
///
///   Sequential({ops::linear(64, 96), ops::rotary({.num_heads = 4, .head_dim = 16,
///                                                 .num_kv_heads = 1}),
///               ops::attention({.num_heads = 4, .head_dim = 16, .num_kv_heads = 1,
///                               .causal = true}), ops::linear(64, 64)});
///
/// Shapes:  x [..., sequence, (num_heads + 2 num_kv_heads) head_dim] -> y [..., sequence, num_heads
///          head_dim]; with options.mask the extra input mask broadcasts to [..., num_heads,
///          sequence, sequence].
/// Dtypes:  y has the dtype of torch.autocast, else of x; mask is boolean or floating.
/// Source:  Vaswani et al. 2017, arXiv:1706.03762; heads that share keys: Ainslie et al. 2023,
///          arXiv:2305.13245; soft cap: Gemma Team 2024, arXiv:2408.00118.
TANDEM_API Op attention(const AttentionOptions& options);
/// y = head / sqrt(mean(head^2) + eps) * weight for each head of queries and keys; values stay. The
/// op stands between a product and `rotary`. Parameters "query_weight" and "key_weight" start with
/// the values of rms_norm's weight.
///
///   Sequential({ops::linear(64, 96), ops::qk_norm(16, {.num_heads = 4, .num_kv_heads = 1}),
///               ops::rotary({.num_heads = 4, .head_dim = 16, .num_kv_heads = 1})});
///
/// Shapes:  x [..., sequence, (num_heads + 2 num_kv_heads) head_dim], query_weight and key_weight
///          [head_dim] -> y like x.
/// Dtypes:  y has the dtype of torch.autocast, else of query_weight.
/// Source:  Henry et al. 2020, arXiv:2010.04245, with the norm of Zhang and Sennrich 2019,
///          arXiv:1910.07467.
TANDEM_API Op qk_norm(int64_t head_dim, const QkNormOptions& options);

/// y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.
///
/// Shapes:  x [..., hidden], weight [hidden] -> y like x.
/// Dtypes:  y has the dtype of torch.autocast, else of weight; sums are float32 or wider.
/// Throws:  c10::ValueError unless hidden is positive and eps finite and at least 0.
/// Source:  Zhang and Sennrich 2019, arXiv:1910.07467.
TANDEM_API Op rms_norm(int64_t hidden, const NormOptions& options = {});
/// y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.
///
/// Shapes:  x [..., hidden], weight and bias [hidden] -> y like x.
/// Dtypes:  y has the dtype of torch.autocast, else of weight; sums are float32 or wider.
/// Throws:  c10::ValueError unless hidden is positive and eps finite and at least 0, and where
///          rounds_before_weight is set, which only rms_norm supports.
/// Source:  Ba, Kiros and Hinton 2016, arXiv:1607.06450.
TANDEM_API Op layer_norm(int64_t hidden, const NormOptions& options = {});
/// rms_norm and layer_norm over the last dimensions, as many as `normalized_shape` has.
///
/// Shapes:  x [..., *normalized_shape], weight and bias [*normalized_shape] -> y like x.
/// Throws:  c10::ValueError unless normalized_shape has at least one size and all its sizes are
///          positive, and as the norm over one dimension.
TANDEM_API Op rms_norm(const std::vector<int64_t>& normalized_shape,
                       const NormOptions& options = {});
TANDEM_API Op layer_norm(const std::vector<int64_t>& normalized_shape,
                         const NormOptions& options = {});
/// y = x / sqrt(sum(x^2) + eps) over the last dimension.
///
/// Shapes:  x [..., hidden] -> y like x.
/// Dtypes:  y has the dtype of x; sums are float32 or wider.
TANDEM_API Op l2_normalization(const L2NormalizationOptions& options = {});
/// The activations and gated units of tandem/activations.h: gelu(), swiglu() and so on.
///
/// Shapes:  activations: x any -> y like x; gated units: x [..., 2 features] -> y [..., features].
/// Dtypes:  y has the dtype of torch.autocast, else of x.
/// Source:  Hendrycks and Gimpel 2016, arXiv:1606.08415; Shazeer 2020, arXiv:2002.05202.
#define TANDEM_FUNCTION(name, ...) TANDEM_API Op name();
TANDEM_ACTIVATIONS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION
#define TANDEM_FUNCTION(name, ...) TANDEM_API Op name(const GluOptions& options = {});
TANDEM_GATED_UNITS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION
/// y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), [a, b] = x.
///
/// Shapes:  x [..., 2 features] -> y [..., features].
/// Dtypes:  y has the dtype of torch.autocast, else of x.
TANDEM_API Op situglu(const SituGluOptions& options = {});
/// y = a' sigmoid(alpha a') (b' + glu_linear_offset), [a, b] = x, a' = min(a, limit), b' =
/// min(max(b, -limit), limit).
///
/// Shapes:  x [..., 2 features] -> y [..., features].
/// Dtypes:  y has the dtype of torch.autocast, else of x.
TANDEM_API Op clamped_swiglu(const ClampedSwigluOptions& options = {});
/// Units times the extra input "scales", which has one number for each row of x: swiglu, situglu,
/// clamped_swiglu and srelu.
///
/// Shapes:  as the unit; scales has the shape of x without its last dimension.
/// Dtypes:  y has the dtype of torch.autocast, else of x.
TANDEM_API Op scaled_swiglu(const GluOptions& options = {});
TANDEM_API Op scaled_situglu(const SituGluOptions& options = {});
TANDEM_API Op scaled_clamped_qgeglu(const ClampedSwigluOptions& options = {});
TANDEM_API Op scaled_srelu();
/// y = x.
TANDEM_API Op identity();
/// In training y = x / (1 - p), or 0 with probability p; in evaluation y = x.
///
/// Shapes:  x any -> y like x.
/// Dtypes:  y has the dtype of x.
TANDEM_API Op dropout(const DropoutOptions& options = {});
/// y = x * factor.
///
/// Shapes:  x any -> y like x.
/// Dtypes:  y has the dtype of x.
TANDEM_API Op constant_scale(double factor);
/// y = x.reshape(shape); one size may be -1.
///
/// Shapes:  x of any shape with a fitting number of elements -> y of `shape`.
/// Dtypes:  y has the dtype of x.
TANDEM_API Op reshape(std::vector<int64_t> shape);
/// Under a recipe y is x rounded to the recipe's format of inputs, with options.backward the
/// gradient is rounded to its format of gradients. Without a recipe y = x.
///
/// Shapes:  x any -> y like x.
/// Dtypes:  y has the dtype of x.
TANDEM_API Op quantize(const QuantizeOptions& options = {});
/// y = x, and x is an extra output too. A channel passes it to another op, the caller gets it, or
/// both; without a channel the caller gets it.
///
/// Shapes:  x any -> y and the extra output like x.
TANDEM_API Op make_extra_output(const Channel& channel = {});

struct AddExtraInputOptions {
  /// The channel of the extra input; empty: the caller passes the extra input.
  std::string channel = {};
  /// The sum is written into the caller's tensor.
  bool in_place = false;
};
/// y = x + extra.
///
/// Shapes:  x and extra broadcast to y, as in torch, where the caller passes the smaller one or
///          nobody needs its gradient.
/// Dtypes:  y has the dtype to which torch promotes x and extra.
TANDEM_API Op add_extra_input(const AddExtraInputOptions& options = {});

}  // namespace ops
}  // namespace tandem
