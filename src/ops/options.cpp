#include "ops/options.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

namespace tandem::ops {

namespace {

using nlohmann::json;

/// Reads named members of an options object; `finish` refuses what nobody read.
class Reader {
 public:
  explicit Reader(const json& options) : options_(options) {
    TORCH_CHECK_VALUE(options.is_object() || options.is_null(),
                      "op options: expected a JSON object, got ", options.dump(),
                      ". Pass {} for the defaults.");
  }

  template <typename T>
  Reader& get(const char* name, T& value) {
    known_.push_back(name);
    if (!options_.is_object() || !options_.contains(name)) return *this;
    try {
      options_.at(name).get_to(value);
    } catch (const json::exception&) {
      TORCH_CHECK_VALUE(false, "op options: expected \"", name, "\" to be like ",
                        json(value).dump(), ", got ", options_.at(name).dump(),
                        ". Correct its type.");
    }
    return *this;
  }

  void finish() const {
    for (const auto& [name, value] : options_.items()) {
      bool found = false;
      for (const auto& known : known_) found |= known == name;
      TORCH_CHECK_VALUE(found, "op options: expected one of ", json(known_).dump(), ", got \"",
                        name, "\". Remove it.");
    }
  }

 private:
  const json& options_;
  std::vector<std::string> known_;
};

}  // namespace

Options parse_no_options(const json& options) {
  Reader(options).finish();
  return std::make_shared<int>(0);
}

Options parse_norm(const json& options) {
  NormOptions parsed;
  Reader(options)
      .get("eps", parsed.eps)
      .get("zero_centered_gamma", parsed.zero_centered_gamma)
      .finish();
  TORCH_CHECK_VALUE(parsed.eps >= 0, "norm: expected eps >= 0, got ", parsed.eps,
                    ". Pass a small positive number such as 1e-5.");
  return std::make_shared<NormOptions>(parsed);
}

Options parse_scale(const json& options) {
  ScaleOptions parsed;
  Reader(options).get("factor", parsed.factor).finish();
  return std::make_shared<ScaleOptions>(parsed);
}

Options parse_dropout(const json& options) {
  DropoutOptions parsed;
  Reader(options).get("p", parsed.p).finish();
  TORCH_CHECK_VALUE(parsed.p >= 0 && parsed.p <= 1,
                    "dropout: expected a probability p in [0, 1], got ", parsed.p,
                    ". p is the share that becomes zero.");
  return std::make_shared<DropoutOptions>(parsed);
}

Options parse_reshape(const json& options) {
  ReshapeOptions parsed;
  Reader(options).get("shape", parsed.shape).finish();
  int64_t inferred = 0;
  for (const int64_t size : parsed.shape) {
    inferred += size == -1;
    TORCH_CHECK_VALUE(size >= -1 && inferred <= 1,
                      "reshape: expected sizes >= 0 and at most one -1, got ",
                      json(parsed.shape).dump(), ". One size can be inferred.");
  }
  return std::make_shared<ReshapeOptions>(std::move(parsed));
}

Options parse_quantize(const json& options) {
  QuantizeOptions parsed;
  Reader(options).get("forward", parsed.forward).get("backward", parsed.backward).finish();
  return std::make_shared<QuantizeOptions>(parsed);
}

}  // namespace tandem::ops
