#include "ops/options.h"

#include <c10/util/Exception.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "core/json_fields.h"

namespace tandem::ops {

using nlohmann::json;

namespace {
Fields fields_of(const json& options) { return {options, "op options"}; }
}  // namespace

Options parse_no_options(const json& options) {
  fields_of(options).finish();
  return std::make_shared<int>(0);
}

Options parse_norm(const json& options) {
  NormOptions parsed;
  fields_of(options)
      .get("eps", parsed.eps)
      .get("zero_centered_gamma", parsed.zero_centered_gamma)
      .finish();
  TORCH_CHECK_VALUE(parsed.eps >= 0, "norm: expected eps >= 0, got ", parsed.eps,
                    ". Pass a small positive number such as 1e-5.");
  return std::make_shared<NormOptions>(parsed);
}

Options parse_scale(const json& options) {
  ScaleOptions parsed;
  fields_of(options).get("factor", parsed.factor).finish();
  return std::make_shared<ScaleOptions>(parsed);
}

Options parse_dropout(const json& options) {
  DropoutOptions parsed;
  fields_of(options).get("p", parsed.p).finish();
  TORCH_CHECK_VALUE(parsed.p >= 0 && parsed.p <= 1,
                    "dropout: expected a probability p in [0, 1], got ", parsed.p,
                    ". p is the share that becomes zero.");
  return std::make_shared<DropoutOptions>(parsed);
}

Options parse_reshape(const json& options) {
  ReshapeOptions parsed;
  fields_of(options)
      .get("shape", parsed.shape, limits::kDimensions, std::numeric_limits<int64_t>::min(),
           std::numeric_limits<int64_t>::max())
      .finish();
  int64_t inferred = 0, elements = 1;
  for (const int64_t size : parsed.shape) {
    inferred += size == -1;
    TORCH_CHECK_VALUE(size >= -1 && inferred <= 1,
                      "reshape: expected sizes >= 0 and at most one -1, got ",
                      shown_json(json(parsed.shape)), ". One size can be inferred.");
    TORCH_CHECK_VALUE(size <= 0 || !__builtin_mul_overflow(elements, size, &elements),
                      "reshape: expected sizes whose product is below 2^63, got ",
                      shown_json(json(parsed.shape)), ". No tensor has as many elements.");
  }
  return std::make_shared<ReshapeOptions>(std::move(parsed));
}

Options parse_linear(const json& options) {
  LinearOptions parsed;
  std::string dummy = "none";
  fields_of(options)
      .get("accumulate_into_main_grad", parsed.accumulate_into_main_grad)
      .get("overwrite_main_grad", parsed.overwrite_main_grad)
      .get("dummy_gradient", dummy)
      .finish();
  using Dummy = LinearOptions::Dummy;
  parsed.dummy = dummy == "empty" ? Dummy::empty : dummy == "zeros" ? Dummy::zeros : Dummy::none;
  TORCH_CHECK_VALUE(parsed.dummy != Dummy::none || dummy == "none",
                    "linear: expected dummy_gradient \"none\", \"empty\" or \"zeros\", got \"",
                    shown(dummy), "\". Name what is returned beside main_grad.");
  return std::make_shared<LinearOptions>(parsed);
}

Options parse_grouped_linear(const json& options) {
  GroupedLinearOptions parsed;
  uint64_t groups = parsed.num_groups;
  fields_of(options)
      .get("num_groups", groups)
      .get("bias", parsed.bias)
      .get("packed_weight", parsed.packed_weight)
      .get("packed_bias", parsed.packed_bias)
      .finish();
  TORCH_CHECK_VALUE(groups >= 1 && groups <= limits::kParams / 2, "grouped_linear: expected 1 to ",
                    limits::kParams / 2, " groups, got ", groups, ". Give the number of weights.");
  parsed.num_groups = groups;
  return std::make_shared<GroupedLinearOptions>(parsed);
}

Options parse_quantize(const json& options) {
  QuantizeOptions parsed;
  fields_of(options).get("forward", parsed.forward).get("backward", parsed.backward).finish();
  return std::make_shared<QuantizeOptions>(parsed);
}

}  // namespace tandem::ops
