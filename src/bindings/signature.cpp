#include <cmath>
#include <nlohmann/json.hpp>

#include "bindings/bindings.h"
#include "core/op_def.h"
#include "quantization/recipe.h"

namespace tandem::bindings {

namespace {

using nlohmann::json;

struct TypeName {
  const char* operator()(bool) const { return "flag"; }
  const char* operator()(double) const { return "number"; }
  const char* operator()(int64_t) const { return "whole"; }
  const char* operator()(const std::string&) const { return "text"; }
  const char* operator()(const std::vector<int64_t>&) const { return "shape"; }
};

json bound(double value) { return std::isinf(value) ? json() : json(value); }

json option_json(const OptionDef& option) {
  return {{"name", option.name},
          {"type", std::visit(TypeName{}, option.otherwise)},
          {"default", json_of(option.otherwise)},
          {"expected", expected(option)},
          {"least", bound(option.check.least)},
          {"greatest", bound(option.check.greatest)},
          {"words", option.check.words},
          {"is_required", option.check.is_required},
          {"doc", option.doc}};
}

json options_json(const Signature& signature) {
  json options = json::array();
  for (const OptionDef& option : signature.options()) options.push_back(option_json(option));
  return options;
}

json param_json(const ParamDef& param) {
  static constexpr const char* kInits[] = {"zeros", "ones", "kaiming_uniform"};
  return {{"name", param.name},
          {"shape", param.shape},
          {"init", kInits[static_cast<size_t>(param.init)]},
          {"zeros_if", param.zeros_if}};
}

const char* dtype_rule(DtypeRule rule) {
  static constexpr const char* kRules[] = {"weight", "input", "promote", "promote_number"};
  return kRules[static_cast<size_t>(rule)];
}

}  // namespace

std::string signature_of(const std::string& name) {
  const OpDef& def = op_def(name);
  json sizes = json::array(), params = json::array();
  for (const SizeDef& size : def.sizes) sizes.push_back({{"name", size.name}, {"doc", size.doc}});
  for (const ParamDef& param : def.params) params.push_back(param_json(param));
  Names extra_inputs(def.inputs.begin() + 1, def.inputs.end());
  if (def.absent_inputs != nullptr) {
    OptionValues options;
    for (const OptionDef& option : def.signature.options())
      options.emplace_back(option.name, option.otherwise);
    extra_inputs.resize(extra_input_count(def, def.signature.parse(name, options).get()));
  }
  json drawn = json::array();
  for (const ResultDef& result : def.results)
    if (result.kind == ResultDef::seed) drawn.push_back(result.name);
  return json{{"name", def.name},
              {"formula", def.formula},
              {"family", def.family},
              {"sizes", sizes},
              {"options", options_json(def.signature)},
              {"parameters", params},
              {"extra_inputs", extra_inputs},
              {"extra_outputs", def.extra_outputs},
              {"context", def.context},
              {"drawn", drawn},
              {"dtype_rule", dtype_rule(def.dtype)},
              {"depends_on_training", def.is_identity != nullptr}}
      .dump();
}

std::string recipe_signature_of(const std::string& name) {
  return options_json(recipe_signature(name)).dump();
}

}  // namespace tandem::bindings
