#include "bench_quantizers.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "kernel_ops/quantize/quantize.h"
#include "output.h"
#include "pipeline/op_call.h"
#include "quantization/recipe.h"
#include "recipes.h"
#include "text.h"

namespace tandem::cli {

namespace {

struct Row {
  std::string recipe, quantizer;
  double seconds, bytes;
};

}  // namespace

double total_bytes(std::span<const at::Tensor> group) {
  double bytes = 0;
  for (const at::Tensor& part : group)
    if (part.defined()) bytes += static_cast<double>(part.nbytes());
  return bytes;
}

std::string bench_quantizers(int64_t rows, int64_t width, at::ScalarType dtype, bool json,
                             const Measure& measure) {
  const at::Tensor x = at::randn({rows, width}, at::TensorOptions().dtype(dtype));
  at::Tensor copy = at::empty_like(x);
  const auto read = static_cast<double>(x.nbytes());
  std::vector<Row> found;
  std::vector<std::function<void()>> calls{[&] { copy.copy_(x); }};
  for (const NamedRecipe& recipe : named_recipes()) {
    std::set<std::string> seen;
    for (const Role role : {Role::input, Role::weight, Role::grad_output}) {
      const Quantizer& quantizer =
          tandem::quantizer(quantizer_text(to_json(recipe.recipe).dump(), role, "basic_linear"));
      if (!seen.insert(quantizer.text).second) continue;
      std::optional<at::Tensor> given;
      if (given_to(quantizer) == Given::seed) given = at::ones({}, at::kLong);
      if (given_to(quantizer) == Given::scale) given = at::ones({1}, at::kFloat);
      const auto call = [&x, &quantizer, given] {
        return kernel_ops::dispatch<kernel_ops::Quantize>(
            {.x = x, .given = given, .quantizer = quantizer, .output_mask = {true, true, false}});
      };
      found.push_back({recipe.name, quantizer.text, 0, read + total_bytes(call())});
      calls.push_back([call] { call(); });
    }
  }
  const std::vector<double> seconds = measure(calls);
  const double copied = 2 * read / seconds[0];
  nlohmann::json document{{"command", "bench"}, {"copy_bytes_per_second", copied}};
  std::string text = format("%-10s %-44s %12s %10s %14s\n", "recipe", "quantizer", "time", "GB/s",
                            "share of copy");
  for (size_t i = 0; i < found.size(); ++i) {
    Row& row = found[i];
    row.seconds = seconds[i + 1];
    const double rate = row.bytes / row.seconds;
    document["quantizers"].push_back({{"recipe", row.recipe},
                                      {"quantizer", row.quantizer},
                                      {"seconds", row.seconds},
                                      {"bytes", row.bytes},
                                      {"share_of_copy", rate / copied}});
    text += format("%-10s %-44s %9.1f us %10.1f %14.2f\n", row.recipe.c_str(),
                   row.quantizer.c_str(), row.seconds * 1e6, rate * 1e-9, rate / copied);
  }
  return json ? document.dump(1) + "\n" : text;
}

}  // namespace tandem::cli
