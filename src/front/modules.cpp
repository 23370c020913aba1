#include "tandem/modules.h"

#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>

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

/// Adds a product, the collectives that reduce it over ranks, and its bias. A bias that is returned
/// becomes a parameter that no part reads.
void add_product(Op& made, int64_t in, int64_t out, const std::string& prefix,
                 const Init& init_method, const std::vector<Op>& after, bool bias,
                 bool return_bias) {
  Op product = op("basic_linear", {{"in_features", in}, {"out_features", out}});
  product.parameters[0].init = init_method;
  append(made, product, {prefix + "weight"});
  for (const Op& part : after) append(made, part);
  if (!bias) return;
  Op sum = op("bias", {{"features", out}});
  if (return_bias) sum.basic_ops.clear();
  append(made, sum, {prefix + "bias"});
}

/// Builds an op with one product. `add_first` adds the parts before the product, such as a norm.
template <typename Options, typename AddFirst>
Op make_one_product(const std::string& name, int64_t in_features, int64_t out_features,
                    const Options& options, AddFirst&& add_first) {
  const TensorParallel& parallel = options.tensor_parallel;
  const auto [before, after, ranks] = collectives(name, parallel);
  const bool is_column = parallel.mode == TensorParallel::Mode::column;
  const int64_t in = share(name, "in_features", in_features, is_column ? 1 : ranks),
                out = share(name, "out_features", out_features, is_column ? ranks : 1);
  Op made{name, {}};
  add_first(made, in, before);
  add_product(made, in, out, "", options.init_method, after, options.bias, options.return_bias);
  split_parameters(made, options.parameters_split, out_features, is_column ? ranks : 1);
  return with_gradients(std::move(made), options);
}

Op make_linear(int64_t in_features, int64_t out_features, const tandem::LinearOptions& options) {
  Op made = make_one_product("linear", in_features, out_features, options,
                             [](Op& first, int64_t /*in*/, const std::vector<Op>& before) {
                               for (const Op& part : before) append(first, part);
                             });
  for (BasicOp& part : made.basic_ops)
    if (part.name == "basic_linear" && options.save_original_input)
      part.options.emplace_back("save_original_input", true);
  return made;
}

Op make_layer_norm_linear(int64_t in_features, int64_t out_features,
                          const LayerNormLinearOptions& options) {
  return make_one_product("layer_norm_linear", in_features, out_features, options,
                          [&](Op& made, int64_t in, const std::vector<Op>& before) {
                            add_norm(made, in, options, before);
                          });
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

Op make_layer_norm_mlp(int64_t hidden_size, int64_t ffn_hidden_size,
                       const LayerNormMLPOptions& options) {
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

Op layer_norm_linear(int64_t in_features, int64_t out_features,
                     const LayerNormLinearOptions& options) {
  return for_list(make_layer_norm_linear(in_features, out_features, options), options.return_bias);
}

Op layer_norm_mlp(int64_t hidden_size, int64_t ffn_hidden_size,
                  const LayerNormMLPOptions& options) {
  return for_list(make_layer_norm_mlp(hidden_size, ffn_hidden_size, options), options.return_bias);
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

LinearImpl::LinearImpl(int64_t in_features, int64_t out_features, const LinearOptions& linear,
                       const at::TensorOptions& options)
    : OpModule("Linear", ops::make_linear(in_features, out_features, linear), options,
               linear.return_bias) {}

LayerNormLinearImpl::LayerNormLinearImpl(int64_t in_features, int64_t out_features,
                                         const LayerNormLinearOptions& layer_norm_linear,
                                         const at::TensorOptions& options)
    : OpModule("LayerNormLinear",
               ops::make_layer_norm_linear(in_features, out_features, layer_norm_linear), options,
               layer_norm_linear.return_bias, layer_norm_linear.return_layernorm_output) {}

LayerNormMLPImpl::LayerNormMLPImpl(int64_t hidden_size, int64_t ffn_hidden_size,
                                   const LayerNormMLPOptions& layer_norm_mlp,
                                   const at::TensorOptions& options)
    : OpModule("LayerNormMLP",
               ops::make_layer_norm_mlp(hidden_size, ffn_hidden_size, layer_norm_mlp), options,
               layer_norm_mlp.return_bias, layer_norm_mlp.return_layernorm_output) {}

}  // namespace tandem
