#include "tandem/ops.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include "core/json_fields.h"

namespace tandem::ops {

namespace {

using nlohmann::json;
using Init = ParameterSpec::Init;

json basic(const char* op, json options = json::object(), std::vector<int> params = {}) {
  return {{"op", op}, {"options", std::move(options)}, {"params", std::move(params)}};
}

Op single(const char* name, json options = json::object(),
          std::vector<ParameterSpec> parameters = {}) {
  std::vector<int> params;
  for (size_t i = 0; i < parameters.size(); ++i) params.push_back(static_cast<int>(i));
  return {name, json::array({basic(name, std::move(options), std::move(params))}).dump(),
          std::move(parameters)};
}

void check_features(const char* op, const char* name, int64_t features) {
  TORCH_CHECK_VALUE(features > 0, op, ": expected ", name, " > 0, got ", features,
                    ". Give the size of the last dimension.");
}

/// Throws c10::ValueError on bytes that are no UTF-8: a description, which is JSON, cannot hold them.
std::string checked_channel(std::string name, const char* op) {
  try {
    json(name).dump();
  } catch (const json::type_error&) {
    TORCH_CHECK_VALUE(false, op, ": expected a channel named in UTF-8, got \"", shown(name),
                      "\". Rename it.");
  }
  return name;
}

}  // namespace

Op linear(int64_t in_features, int64_t out_features, bool bias) {
  check_features("linear", "in_features", in_features);
  check_features("linear", "out_features", out_features);
  json basics = json::array({basic("basic_linear", json::object(), {0})});
  std::vector<ParameterSpec> parameters{
      {"weight", {out_features, in_features}, Init::kaiming_uniform}};
  if (bias) {
    basics.push_back(basic("bias", json::object(), {1}));
    parameters.push_back({"bias", {out_features}, Init::zeros});
  }
  return {"linear", basics.dump(), std::move(parameters)};
}

Op rms_norm(int64_t hidden, double eps, bool zero_centered_gamma) {
  check_features("rms_norm", "hidden", hidden);
  return single("rms_norm", {{"eps", eps}, {"zero_centered_gamma", zero_centered_gamma}},
                {{"weight", {hidden}, zero_centered_gamma ? Init::zeros : Init::ones}});
}

Op layer_norm(int64_t hidden, double eps, bool zero_centered_gamma) {
  check_features("layer_norm", "hidden", hidden);
  return single("layer_norm", {{"eps", eps}, {"zero_centered_gamma", zero_centered_gamma}},
                {{"weight", {hidden}, zero_centered_gamma ? Init::zeros : Init::ones},
                 {"bias", {hidden}, Init::zeros}});
}

Op swiglu() { return single("swiglu"); }
Op geglu() { return single("geglu"); }
Op gelu() { return single("gelu"); }
Op silu() { return single("silu"); }
Op relu() { return single("relu"); }
Op identity() { return single("identity"); }
Op dropout(double p) { return single("dropout", {{"p", p}}); }
Op constant_scale(double factor) { return single("constant_scale", {{"factor", factor}}); }
Op reshape(std::vector<int64_t> shape) { return single("reshape", {{"shape", std::move(shape)}}); }
Op quantize(bool forward, bool backward) {
  return single("quantize", {{"forward", forward}, {"backward", backward}});
}

Op make_extra_output(std::string channel, bool output_to_caller) {
  json op = basic("make_extra_output");
  if (!channel.empty())
    op["extra_outputs"] = json::array({{{"channel", checked_channel(channel, "make_extra_output")},
                                        {"to_caller", output_to_caller}}});
  return {"make_extra_output", json::array({op}).dump(), {}};
}

Op add_extra_input(std::string channel, bool in_place) {
  json op = basic("add_extra_input");
  if (!channel.empty())
    op["extra_inputs"] = json::array({{{"channel", checked_channel(channel, "add_extra_input")}}});
  if (in_place) op["in_place"] = true;
  return {"add_extra_input", json::array({op}).dump(), {}};
}

}  // namespace tandem::ops
