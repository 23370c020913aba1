#include "tandem/modules.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "core/json_fields.h"
#include "core/op_def.h"
#include "front/parts.h"

namespace tandem {

namespace ops {

namespace {

/// The module's names for the parameters of a norm; RMSNorm has only the first one.
const std::vector<std::string> kNormNames = {"layer_norm_weight", "layer_norm_bias"};

/// Adds the norm, its output as a result where the options return it, and the collectives before
/// the product.
template <typename Options>
void add_norm(Op& made, int64_t features, const Options& options, const std::vector<Op>& before) {
  const NormOptions norm{options.eps, options.zero_centered_gamma};
  append(made,
         options.normalization == Normalization::layer_norm ? layer_norm(features, norm)
                                                            : rms_norm(features, norm),
         kNormNames);
  const bool is_gathered =
      options.return_layernorm_output_gathered && options.tensor_parallel.sequence_parallel;
  if (options.return_layernorm_output && !is_gathered) append(made, make_extra_output());
  for (const Op& part : before) append(made, part);
  if (options.return_layernorm_output && is_gathered) append(made, make_extra_output());
}

/// Adds a product, the collectives that reduce it over ranks, and its bias, which with
/// `adds_on_each_rank` precedes them. A bias that is returned becomes a parameter that no part
/// reads.
void add_product(Op& made, int64_t in, int64_t out, const std::string& prefix,
                 const Init& init_method, const std::vector<Op>& after, bool bias, bool return_bias,
                 bool adds_on_each_rank = false) {
  Op product = op("basic_linear", {{"in_features", in}, {"out_features", out}});
  product.parameters[0].init = init_method;
  append(made, product, {prefix + "weight"});
  Op sum = op("bias", {{"features", out}});
  if (return_bias) sum.basic_ops.clear();
  if (bias && adds_on_each_rank) append(made, sum, {prefix + "bias"});
  for (const Op& part : after) append(made, part);
  if (bias && !adds_on_each_rank) append(made, sum, {prefix + "bias"});
}

using Split = std::vector<std::pair<std::string, int64_t>>;

/// Returns the features of each part on one of `ranks` ranks.
Split checked_split(const std::string& op, const Split& parts, int64_t out_features,
                    int64_t ranks) {
  Split own;
  int64_t sum = 0;
  for (const auto& [name, features] : parts) {
    TORCH_CHECK_VALUE(!name.empty() && name.find('.') == std::string::npos &&
                          std::ranges::count(own, name, &Split::value_type::first) == 0,
                      op, ": expected names in parameters_split that differ and have no dot, got ",
                      "\"", shown(name), "\". Rename the part.");
    own.emplace_back(name, share(op, "features in parameters_split", features, ranks));
    sum += features;
  }
  TORCH_CHECK_VALUE(sum == out_features, op, ": expected parameters_split to sum up to ",
                    "out_features, ", out_features, ", got ", sum, ". Give the features of each.");
  return own;
}

/// Replaces a parameter, if the op has it, by one for each part of its rows: "<part>_<operand>".
void split_parameter(Op& op, const std::string& operand, const Split& parts) {
  const auto at = std::ranges::find(op.parameters, operand, &ParameterSpec::name);
  if (at == op.parameters.end()) return;
  const size_t place = static_cast<size_t>(at - op.parameters.begin()), more = parts.size() - 1;
  const ParameterSpec whole = *at;
  std::vector<ParameterSpec> specs;
  for (const auto& [name, rows] : parts) {
    ParameterSpec& spec = specs.emplace_back(whole);
    spec.name = name + "_" + operand;
    spec.shape[0] = rows;
  }
  op.parameters.insert(op.parameters.erase(at), specs.begin(), specs.end());
  for (BasicOp& basic : op.basic_ops) {
    std::vector<size_t> places, joins;
    for (const size_t each : basic.parameters) {
      for (size_t part = 0; part < (each == place ? parts.size() : 1); ++part)
        places.push_back(each > place ? each + more : each + part);
      joins.push_back(each == place ? parts.size() : 1);
    }
    if (places.size() != basic.parameters.size()) basic.joins = std::move(joins);
    basic.parameters = std::move(places);
  }
}

/// Makes an op of one product, with a norm before it if there are options of one.
template <typename Options>
Op make_one_product(const std::string& name, int64_t in_features, int64_t out_features,
                    const Options& options, bool adds_on_each_rank = false) {
  const TensorParallel& parallel = options.tensor_parallel;
  const auto [before, after, ranks] = collectives(name, parallel);
  const bool is_column = parallel.mode == TensorParallel::Mode::column;
  const int64_t in = share(name, "in_features", in_features, is_column ? 1 : ranks),
                out = share(name, "out_features", out_features, is_column ? ranks : 1);
  Op made{name, {}};
  if constexpr (requires { options.normalization; })
    add_norm(made, in, options, before);
  else
    for (const Op& part : before) append(made, part);
  const size_t product = made.basic_ops.size();
  add_product(made, in, out, "", options.init_method, after, options.bias, options.return_bias,
              adds_on_each_rank);
  if constexpr (requires { options.save_original_input; })
    if (options.save_original_input)
      made.basic_ops[product].options.emplace_back("save_original_input", true);
  if (const Split& parts = options.parameters_split; !parts.empty()) {
    const Split own = checked_split(name, parts, out_features, is_column ? ranks : 1);
    for (const char* operand : {"weight", "bias"}) split_parameter(made, operand, own);
  }
  return with_gradients(std::move(made), options);
}

Op make(int64_t in_features, int64_t out_features, const tandem::LinearOptions& options) {
  return make_one_product("linear", in_features, out_features, options);
}

Op make(int64_t in_features, int64_t out_features, const LayerNormLinearOptions& options) {
  return make_one_product("layer_norm_linear", in_features, out_features, options);
}

/// Whether an activation is a gated unit. Throws c10::ValueError for an unknown activation.
bool is_gated(const std::string& activation) {
  std::string names;
  for (const std::string& name : op_names()) {
    const std::string_view family = op_def(name).family;
    if (family != "activation" && family != "glu") continue;
    if (name == activation) return family == "glu";
    names += (names.empty() ? "" : ", ") + name;
  }
  TORCH_CHECK_VALUE(false, "layer_norm_mlp: expected activation to be one of ", names, ", got \"",
                    shown(activation), "\". Name one of them.");
}

Op make(int64_t hidden_size, int64_t ffn_hidden_size, const LayerNormMLPOptions& options) {
  const std::string name = "layer_norm_mlp";
  const bool gated = is_gated(options.activation);
  TensorParallel parallel = options.tensor_parallel;
  const bool is_parallel = parallel.mode != TensorParallel::Mode::none;
  if (is_parallel) parallel.mode = TensorParallel::Mode::column;
  const Collectives first = collectives(name, parallel);
  if (is_parallel) parallel.mode = TensorParallel::Mode::row;
  const Collectives second = collectives(name, parallel);
  const int64_t hidden = share(name, "hidden_size", hidden_size, 1),
                inner = share(name, "ffn_hidden_size", ffn_hidden_size, first.size);
  Op made{name, {}};
  add_norm(made, hidden, options, first.before);
  add_product(made, hidden, gated ? 2 * inner : inner, "fc1_", options.init_method, first.after,
              options.bias, /*return_bias=*/false);
  append(made, op(options.activation, {}, options.activation_params));
  if (options.checkpoint)
    for (BasicOp& part : made.basic_ops) part.recompute = true;
  add_product(made, inner, hidden, "fc2_", options.output_layer_init_method, second.after,
              options.bias, options.return_bias);
  return with_gradients(std::move(made), options);
}

Op for_list(Op op, bool return_bias) {
  TORCH_CHECK_VALUE(!return_bias, op.name, ": expected an op whose output is what the next op ",
                    "takes, got one with return_bias. Use the module, or leave it out.");
  return op;
}

}  // namespace

Op linear(int64_t in_features, int64_t out_features, const LinearOptions& options) {
  const tandem::LinearOptions own{.bias = options.bias,
                                  .init_method = init::kaiming_uniform(),
                                  .tensor_parallel = options.tensor_parallel,
                                  .parameters_split = options.parameters_split,
                                  .save_original_input = options.save_original_input};
  return make_one_product("linear", in_features, out_features, own, /*adds_on_each_rank=*/true);
}

Op layer_norm_linear(int64_t in_features, int64_t out_features,
                     const LayerNormLinearOptions& options) {
  return for_list(make(in_features, out_features, options), options.return_bias);
}

Op layer_norm_mlp(int64_t hidden_size, int64_t ffn_hidden_size,
                  const LayerNormMLPOptions& options) {
  return for_list(make(hidden_size, ffn_hidden_size, options), options.return_bias);
}

}  // namespace ops

OpModule::OpModule(const char* name, const Op& op, const at::TensorOptions& options,
                   bool returns_bias, bool returns_norm)
    : PipelineModule(name, {op}, Names::plain, options),
      returns_bias_(returns_bias),
      returns_norm_(returns_norm),
      biases_(ops::unread_parameters(op_of(*this))) {}

ModuleOutputs OpModule::forward_all(const at::Tensor& x) {
  std::vector<at::Tensor> outputs = run(x, {});
  ModuleOutputs all{std::move(outputs[0]), {}, {}};
  if (!biases_.empty())
    all.bias = (biases_.size() == 1 ? biases_[0] : at::cat(biases_)).to(all.y.scalar_type());
  if (returns_norm_) all.layernorm_output = std::move(outputs[1]);
  return all;
}

at::Tensor OpModule::forward(const at::Tensor& x) {
  TORCH_CHECK_VALUE(!returns_bias_ && !returns_norm_, name(), ": expected one output, got ",
                    "return_bias or return_layernorm_output. Call forward_all(x), which returns "
                    "all of them.");
  return run(x, {})[0];
}

LinearImpl::LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& own,
                       const at::TensorOptions& options)
    : OpModule("Linear", ops::make(in_features, out_features, own), options, own.return_bias) {}

LayerNormLinearImpl::LayerNormLinearImpl(int64_t in_features, int64_t out_features,
                                         const LayerNormLinearOptions& own,
                                         const at::TensorOptions& options)
    : OpModule("LayerNormLinear", ops::make(in_features, out_features, own), options,
               own.return_bias, own.return_layernorm_output) {}

LayerNormMLPImpl::LayerNormMLPImpl(int64_t hidden_size, int64_t ffn_hidden_size,
                                   const LayerNormMLPOptions& own, const at::TensorOptions& options)
    : OpModule("LayerNormMLP", ops::make(hidden_size, ffn_hidden_size, own), options,
               own.return_bias, own.return_layernorm_output) {}

}  // namespace tandem
