#include "tandem/ops.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/json_fields.h"
#include "core/op_def.h"

namespace tandem::ops {

namespace {

using nlohmann::json;
using Init = ParameterSpec::Init;

/// The sizes in the order of the definition.
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

/// Whether an option of the op is given and true.
bool is_set(const OptionValues& options, std::string_view name) {
  return std::ranges::any_of(options, [&](const auto& option) {
    return option.first == name && option.second == OptionValue(true);
  });
}

Init init_of(const ParamDef& param, const OptionValues& options) {
  if (!param.zeros_if.empty() && is_set(options, param.zeros_if)) return Init::zeros;
  switch (param.init) {
    case ParamDef::Init::zeros:
      return Init::zeros;
    case ParamDef::Init::ones:
      return Init::ones;
    case ParamDef::Init::kaiming_uniform:
      break;
  }
  return Init::kaiming_uniform;
}

/// Throws c10::ValueError on bytes that are no UTF-8: a description, which is JSON, cannot hold
/// them.
std::string checked_channel(std::string name, const char* op) {
  try {
    json(name).dump();
  } catch (const json::type_error&) {
    TORCH_CHECK_VALUE(false, op, ": expected a channel named in UTF-8, got \"", shown(name),
                      "\". Rename it.");
  }
  return name;
}

/// The op with one more field in its description.
Op with(Op op, const char* field, json value) {
  json basics = json::parse(op.basic_ops);
  basics[0][field] = std::move(value);
  op.basic_ops = basics.dump();
  return op;
}

}  // namespace

Op op(const std::string& name, const std::vector<std::pair<std::string, int64_t>>& sizes,
      const OptionValues& options) {
  const OpDef& def = op_def(name);
  const std::vector<int64_t> checked = checked_sizes(def, sizes);
  json given = json::object(), params = json::array();
  for (const auto& [option, value] : options) given[option] = json_of(value);
  def.signature.parse(def.name, given);
  Op made{name, "", {}};
  for (const ParamDef& param : def.params) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_list(param.name), name, ": expected an op whose parameters are ",
        "single tensors, got the list ", param.name, ". Use it from Python.");
    ParameterSpec spec{std::string(param.name), {}, init_of(param, options)};
    for (const auto& size : param.shape)
      spec.shape.push_back(checked[static_cast<size_t>(
          std::ranges::find(def.sizes, size, &SizeDef::name) - def.sizes.begin())]);
    params.push_back(made.parameters.size());
    made.parameters.push_back(std::move(spec));
  }
  made.basic_ops = json::array({{{"op", name}, {"options", given}, {"params", params}}}).dump();
  return made;
}

Op linear(int64_t in_features, int64_t out_features, bool bias) {
  Op product = op("basic_linear", {{"in_features", in_features}, {"out_features", out_features}});
  product.name = "linear";
  if (!bias) return product;
  const Op sum = op("bias", {{"features", out_features}});
  json basics = json::parse(product.basic_ops), added = json::parse(sum.basic_ops);
  added[0]["params"] = {1};
  basics.push_back(added[0]);
  product.basic_ops = basics.dump();
  product.parameters.push_back(sum.parameters[0]);
  return product;
}

Op rms_norm(int64_t hidden, double eps, bool zero_centered_gamma) {
  return op("rms_norm", {{"hidden", hidden}},
            {{"eps", eps}, {"zero_centered_gamma", zero_centered_gamma}});
}

Op layer_norm(int64_t hidden, double eps, bool zero_centered_gamma) {
  return op("layer_norm", {{"hidden", hidden}},
            {{"eps", eps}, {"zero_centered_gamma", zero_centered_gamma}});
}

#define TANDEM_FUNCTION(name, ...) \
  Op name() { return op(#name); }
TANDEM_ACTIVATIONS(TANDEM_FUNCTION)
TANDEM_GATED_UNITS(TANDEM_FUNCTION)
#undef TANDEM_FUNCTION

Op identity() { return op("identity"); }
Op dropout(double p) { return op("dropout", {}, {{"p", p}}); }
Op constant_scale(double factor) { return op("constant_scale", {}, {{"factor", factor}}); }
Op reshape(std::vector<int64_t> shape) { return op("reshape", {}, {{"shape", std::move(shape)}}); }
Op quantize(bool forward, bool backward) {
  return op("quantize", {}, {{"forward", forward}, {"backward", backward}});
}

Op make_extra_output(std::string channel, bool output_to_caller) {
  Op made = op("make_extra_output");
  if (!channel.empty())
    made = with(std::move(made), "extra_outputs",
                json::array({{{"channel", checked_channel(channel, "make_extra_output")},
                              {"to_caller", output_to_caller}}}));
  return made;
}

Op add_extra_input(std::string channel, bool in_place) {
  Op made = op("add_extra_input");
  if (!channel.empty())
    made = with(std::move(made), "extra_inputs",
                json::array({{{"channel", checked_channel(channel, "add_extra_input")}}}));
  return in_place ? with(std::move(made), "in_place", true) : made;
}

}  // namespace tandem::ops
