#include "tandem/ops.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>

#include "core/json_fields.h"
#include "core/op_def.h"
#include "front/describe.h"
#include "front/parts.h"

namespace tandem {

namespace init {

Init zeros() {
  return [](const at::Tensor& tensor) { tensor.zero_(); };
}
Init ones() {
  return [](const at::Tensor& tensor) { tensor.fill_(1); };
}
Init kaiming_uniform() {
  return [](const at::Tensor& tensor) {
    const double bound = 1 / std::sqrt(static_cast<double>(tensor.size(-1)));
    torch::nn::init::uniform_(tensor, -bound, bound);
  };
}
Init normal(double deviation) {
  return [deviation](const at::Tensor& tensor) { torch::nn::init::normal_(tensor, 0, deviation); };
}

}  // namespace init

namespace {

size_t place_of_parameter(const Op& op, const std::string& name) {
  const auto found = std::ranges::find(op.parameters, name, &ParameterSpec::name);
  if (found != op.parameters.end()) return static_cast<size_t>(found - op.parameters.begin());
  std::string names;
  for (const ParameterSpec& spec : op.parameters) names += (names.empty() ? "" : ", ") + spec.name;
  TORCH_CHECK_VALUE(false, op.name, ": expected one of the parameters [", names, "], got \"",
                    shown(name), "\". Name one of them.");
}

void check_shape(const Op& op, const ParameterSpec& spec, const char* what,
                 const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), op.name, ": expected ", what, " of shape ",
                    at::IntArrayRef(spec.shape), ", got an undefined tensor. Make it first.");
  TORCH_CHECK_VALUE(tensor.sizes() == at::IntArrayRef(spec.shape), op.name, ": expected ", what,
                    " of shape ", at::IntArrayRef(spec.shape), ", got ", tensor.sizes(),
                    ". Give one that fits the op.");
}

}  // namespace

Op Op::with_parameter(const std::string& parameter, at::Tensor tensor) const {
  Op made = *this;
  ParameterSpec& spec = made.parameters[place_of_parameter(made, parameter)];
  check_shape(*this, spec, parameter.c_str(), tensor);
  TORCH_CHECK_VALUE(tensor.is_leaf(), name, ": expected ", parameter, " as a leaf, got a result ",
                    "of other tensors. Give the parameter that it is made of.");
  spec.tensor = std::move(tensor);
  return made;
}

Op Op::with_main_grad(const std::string& parameter, at::Tensor main_grad) const {
  Op made = *this;
  const size_t place = place_of_parameter(made, parameter);
  check_shape(*this, parameters[place], "main_grad", main_grad);
  TORCH_CHECK_VALUE(!main_grad.requires_grad(), name, ": expected main_grad without requires_grad,",
                    " got one with it. It is a buffer: detach it.");
  size_t count = 0;
  for (BasicOp& basic : made.basic_ops) {
    const auto found = std::ranges::find(basic.parameters, place);
    if (found == basic.parameters.end() ||
        found - basic.parameters.begin() >= static_cast<std::ptrdiff_t>(weights_of(basic)))
      continue;
    const auto options = op_def(basic.name).signature.options();
    if (std::ranges::find(options, kAccumulateIntoMainGrad, &OptionDef::name) == options.end())
      continue;
    std::erase_if(basic.options,
                  [&](const auto& option) { return option.first == kAccumulateIntoMainGrad; });
    basic.options.emplace_back(kAccumulateIntoMainGrad, true);
    ++count;
  }
  TORCH_CHECK_VALUE(count != 0, name, ": expected the weight of a product, got ", parameter,
                    ". The gradients of others are returned.");
  made.parameters[place].main_grad = std::move(main_grad);
  return made;
}

Op Op::with_delayed_wgrad() const {
  Op made = *this;
  bool has_product = false;
  for (BasicOp& basic : made.basic_ops) {
    const auto options = op_def(basic.name).signature.options();
    if (std::ranges::find(options, kDelayWgrad, &OptionDef::name) == options.end()) continue;
    has_product = true;
    std::erase_if(basic.options, [](const auto& option) { return option.first == kDelayWgrad; });
    basic.options.emplace_back(kDelayWgrad, true);
  }
  TORCH_CHECK_VALUE(has_product, name, ": expected an op with a product, as gradients of its ",
                    "weights can be delayed, got one without. Leave it as it is.");
  return made;
}

namespace ops {

namespace {

/// Returns the sizes in the order of the definition.
std::vector<int64_t> checked_sizes(const OpDef& def,
                                   const std::vector<std::pair<std::string, int64_t>>& given) {
  std::string names;
  for (const SizeDef& size : def.sizes)
    names += (names.empty() ? "" : ", ") + std::string(size.name);
  const auto find = [&](std::string_view name) {
    return std::ranges::find(given, name, &std::pair<std::string, int64_t>::first);
  };
  for (const auto& [name, value] : given)
    TORCH_CHECK_VALUE(std::ranges::find(def.sizes, name, &SizeDef::name) != def.sizes.end(),
                      def.name, ": expected the sizes [", names, "], got one called \"",
                      shown(name), "\". Remove it.");
  std::vector<int64_t> sizes;
  for (const SizeDef& size : def.sizes) {
    const auto found = find(size.name);
    TORCH_CHECK_VALUE(found != given.end(), def.name, ": expected the sizes [", names, "], got no ",
                      size.name, ". Give the ", size.doc, ".");
    TORCH_CHECK_VALUE(found->second > 0, def.name, ": expected size ", size.name, " > 0, got ",
                      found->second, ". Give the ", size.doc, ".");
    sizes.push_back(found->second);
  }
  return sizes;
}

Init init_of(const ParamDef& param, const OptionValues& options) {
  if (!param.zeros_if.empty() && is_set(options, param.zeros_if)) return init::zeros();
  switch (param.init) {
    case ParamDef::Init::zeros:
      return init::zeros();
    case ParamDef::Init::ones:
      return init::ones();
    case ParamDef::Init::kaiming_uniform:
      break;
  }
  return init::kaiming_uniform();
}

/// Returns the parameters of an op whose definition has no list of parameters.
std::vector<ParameterSpec> parameters_of(const OpDef& def, const std::vector<int64_t>& sizes,
                                         const OptionValues& options) {
  std::vector<ParameterSpec> specs;
  for (const ParamDef& param : def.params) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_list(param.name), def.name, ": expected an op whose parameters",
        " are single tensors, got the list ", param.name,
        ". Use its own function, or fill in a tandem::BasicOp and its parameters.");
    ParameterSpec& spec =
        specs.emplace_back(ParameterSpec{std::string(param.name), {}, init_of(param, options)});
    for (const auto& size : param.shape)
      spec.shape.push_back(sizes[static_cast<size_t>(
          std::ranges::find(def.sizes, size, &SizeDef::name) - def.sizes.begin())]);
  }
  return specs;
}

}  // namespace

OptionValues option_values(const std::string& name, const std::type_info& type,
                           const void* options) {
  return op_def(name).signature.values(name, type, options);
}

Op op(const std::string& name, const std::vector<std::pair<std::string, int64_t>>& sizes,
      const OptionValues& options) {
  const OpDef& def = op_def(name);
  const std::vector<int64_t> checked = checked_sizes(def, sizes);
  def.signature.parse(def.name, options);  // throws where a pipeline would refuse them later
  Op made{name, {}, parameters_of(def, checked, options)};
  BasicOp& basic = made.basic_ops.emplace_back(BasicOp{name, options});
  for (size_t i = 0; i < made.parameters.size(); ++i) basic.parameters.push_back(i);
  return made;
}

void append(Op& whole, const Op& part, const std::vector<std::string>& names) {
  const size_t first = whole.parameters.size();
  for (size_t i = 0; i < part.parameters.size(); ++i) {
    ParameterSpec& spec = whole.parameters.emplace_back(part.parameters[i]);
    if (!names.empty()) spec.name = names[i];
  }
  for (BasicOp basic : part.basic_ops) {
    for (size_t& place : basic.parameters) place += first;
    whole.basic_ops.push_back(std::move(basic));
  }
}

std::vector<at::Tensor> unread_parameters(const Op& op) {
  std::vector<at::Tensor> unread;
  for (size_t place = 0; place < op.parameters.size(); ++place)
    if (std::ranges::none_of(op.basic_ops, [&](const BasicOp& basic) {
          return std::ranges::count(basic.parameters, place) != 0;
        }))
      unread.push_back(op.parameters[place].tensor);
  return unread;
}

Collectives collectives(const std::string& op, const TensorParallel& parallel) {
  using Mode = TensorParallel::Mode;
  if (parallel.mode == Mode::none) return {};
  TORCH_CHECK_VALUE(!parallel.group.empty(), op, ": expected the name of a process group in ",
                    "tensor_parallel, got none. Give that of the ranks that share the weight.");
  TORCH_CHECK_VALUE(parallel.size > 0, op, ": expected the ranks of process group ",
                    shown(parallel.group), " in tensor_parallel.size, got ", parallel.size,
                    ". Give its size.");
  if (parallel.size == 1) return {};
  const auto collective = [&](const char* name) {
    return ops::op(name, {}, {{"group", parallel.group}, {"size", parallel.size}});
  };
  if (parallel.mode == Mode::column)
    return {{collective(parallel.sequence_parallel ? "all_gather" : "reduce_gradient")},
            {},
            parallel.size};
  return {{},
          {collective(parallel.sequence_parallel ? "reduce_scatter" : "all_reduce")},
          parallel.size};
}

int64_t share(const std::string& op, const char* name, int64_t features, int64_t ranks) {
  TORCH_CHECK_VALUE(features > 0, op, ": expected ", name, " > 0, got ", features,
                    ". Give a number of features.");
  TORCH_CHECK_VALUE(features % ranks == 0, op, ": expected ", name, " that ", ranks,
                    " ranks share evenly, got ", features, ". Use a multiple of ", ranks, ".");
  return features / ranks;
}

Op grouped_linear(int64_t in_features, int64_t out_features, const GroupedLinearOptions& options) {
  const std::string name = "grouped_linear";
  const OpDef& def = op_def(name);
  Op made{name, {}, {}};
  BasicOp& basic = made.basic_ops.emplace_back(
      BasicOp{name, option_values(name, typeid(GroupedLinearOptions), &options)});
  def.signature.parse(def.name, basic.options);
  const auto sizes =
      checked_sizes(def, {{"in_features", in_features}, {"out_features", out_features}});
  const auto add = [&](const char* parameter, bool is_packed, std::vector<int64_t> shape,
                       const Init& init) {
    if (is_packed) shape.insert(shape.begin(), static_cast<int64_t>(options.num_groups));
    for (size_t group = 0; group < (is_packed ? 1 : options.num_groups); ++group) {
      basic.parameters.push_back(made.parameters.size());
      made.parameters.push_back(
          {is_packed ? parameter : parameter + std::to_string(group), shape, init});
    }
  };
  add("weight", options.packed_weight, {sizes[1], sizes[0]}, init::kaiming_uniform());
  if (options.bias) add("bias", options.packed_bias, {sizes[1]}, init::zeros());
  return made;
}

namespace {

/// A loss with the sizes of its definition, of which the number of classes is the last one.
Op loss(const std::string& name, const std::vector<std::pair<std::string, int64_t>>& given,
        const LinearCrossEntropyOptions& options) {
  const OpDef& def = op_def(name);
  Op made{name, {}, {}};
  BasicOp& basic = made.basic_ops.emplace_back(
      BasicOp{name, option_values(name, typeid(LinearCrossEntropyOptions), &options)});
  def.signature.parse(def.name, basic.options);
  const auto sizes = checked_sizes(def, given);
  const int64_t classes = sizes.back();
  if (sizes.size() == 2)
    made.parameters.push_back({"weight", {classes, sizes[0]}, init::kaiming_uniform()});
  if (options.bias) made.parameters.push_back({"bias", {classes}, init::zeros()});
  if (options.class_weight) made.parameters.push_back({"class_weight", {classes}, init::ones()});
  for (size_t place = 0; place < made.parameters.size(); ++place) basic.parameters.push_back(place);
  return made;
}

void check_layer_norm(const NormOptions& options) {
  TORCH_CHECK_VALUE(!options.rounds_before_weight,
                    "layer_norm: expected rounds_before_weight to be false, as rms_norm alone has "
                    "it, got true. Leave it out.");
}

}  // namespace

Op cross_entropy(int64_t num_classes, const LinearCrossEntropyOptions& options) {
  TORCH_CHECK_VALUE(
      !options.bias,
      "cross_entropy: expected bias to be false, as x holds the logits, got true. Use "
      "linear_cross_entropy, or add the bias before.");
  return loss("cross_entropy", {{"num_classes", num_classes}}, options);
}

Op linear_cross_entropy(int64_t in_features, int64_t num_classes,
                        const LinearCrossEntropyOptions& options) {
  return loss("linear_cross_entropy", {{"in_features", in_features}, {"num_classes", num_classes}},
              options);
}

Op linear_cross_entropy_with_predictions(int64_t in_features, int64_t num_classes,
                                         const LinearCrossEntropyOptions& options) {
  return loss("linear_cross_entropy_with_predictions",
              {{"in_features", in_features}, {"num_classes", num_classes}}, options);
}

Op modulate(const ModulateOptions& options) { return op("modulate", {}, options); }

Op rotary(const RotaryOptions& options) { return op("rotary", {}, options); }

Op attention(const AttentionOptions& options) { return op("attention", {}, options); }

Op qk_norm(int64_t head_dim, const QkNormOptions& options) {
  return op("qk_norm", {{"head_dim", head_dim}}, options);
}

Op rms_norm(int64_t hidden, const NormOptions& options) {
  return op("rms_norm", {{"hidden", hidden}}, options);
}

Op layer_norm(int64_t hidden, const NormOptions& options) {
  check_layer_norm(options);
  return op("layer_norm", {{"hidden", hidden}}, options);
}

namespace {

/// A norm over as many dimensions as `shape` has.
Op norm_over(const std::string& name, const std::vector<int64_t>& shape,
             const NormOptions& options) {
  TORCH_CHECK_VALUE(!shape.empty() && std::ranges::all_of(shape, [](int64_t d) { return d > 0; }),
                    name, ": expected normalized_shape with sizes > 0, got ",
                    at::IntArrayRef(shape), ". Give the sizes of the last dimensions of x.");
  Op made = op(name, {{"hidden", c10::multiply_integers(shape)}}, options);
  for (ParameterSpec& spec : made.parameters) spec.shape = shape;
  return made;
}

}  // namespace

Op rms_norm(const std::vector<int64_t>& normalized_shape, const NormOptions& options) {
  return norm_over("rms_norm", normalized_shape, options);
}

Op layer_norm(const std::vector<int64_t>& normalized_shape, const NormOptions& options) {
  check_layer_norm(options);
  return norm_over("layer_norm", normalized_shape, options);
}

Op l2_normalization(const L2NormalizationOptions& options) {
  return op("l2_normalization", {}, options);
}

#define TANDEM_FUNCTION(name, ...) \
  Op name() { return op(#name); }
TANDEM_ACTIVATIONS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION
#define TANDEM_FUNCTION(name, ...) \
  Op name(const GluOptions& options) { return op(#name, {}, options); }
TANDEM_GATED_UNITS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION
Op situglu(const SituGluOptions& options) { return op("situglu", {}, options); }
Op clamped_swiglu(const ClampedSwigluOptions& options) { return op("clamped_swiglu", {}, options); }
Op scaled_swiglu(const GluOptions& options) { return op("scaled_swiglu", {}, options); }
Op scaled_situglu(const SituGluOptions& options) { return op("scaled_situglu", {}, options); }
Op scaled_clamped_qgeglu(const ClampedSwigluOptions& options) {
  return op("scaled_clamped_qgeglu", {}, options);
}
Op scaled_srelu() { return op("scaled_srelu"); }

Op identity() { return op("identity"); }
Op dropout(const DropoutOptions& options) { return op("dropout", {}, options); }
Op constant_scale(double factor) { return op("constant_scale", {}, ScaleOptions{factor}); }
Op reshape(std::vector<int64_t> shape) {
  return op("reshape", {}, ReshapeOptions{std::move(shape)});
}
Op quantize(const QuantizeOptions& options) { return op("quantize", {}, options); }

Op make_extra_output(const Channel& channel) {
  Op made = op("make_extra_output");
  made.basic_ops[0].extra_outputs = {channel};
  return made;
}

Op add_extra_input(const AddExtraInputOptions& options) {
  Op made = op("add_extra_input");
  made.basic_ops[0].extra_inputs = {{options.channel}};
  made.basic_ops[0].in_place = options.in_place;
  return made;
}

}  // namespace ops
}  // namespace tandem
