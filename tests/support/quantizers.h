// Every quantizer that tests go through: a row in the table of formats is tested without being
// named.
#pragma once

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernel_ops/framework/memory.h"
#include "quantization/formats/format.h"
#include "support/kernel_ops.h"

namespace tandem::testing {

/// Each format with each kind of scale that needs no state, and each of its options.
inline std::vector<std::string> quantizer_texts() {
  std::vector<std::string> texts;
  for (const FormatDef& format : formats())
    for (const ScalingDef* scaling : format.scalings) {
      if (scaling->takes_scale) continue;
      std::string name(format.name);
      if (!scaling->name.empty()) name.append(":").append(scaling->name);
      for (const std::string options :
           {"", ":eps=0.5", ":eps=0.5:pow2=1", ":pow2=1", ":2d=1", ":rht=1", ":rht=1:sr=1", ":sr=1",
            ":4over6=mae", ":rht=1:4over6=mae", ":2d=1:4over6=mse"}) {
        const auto known = std::ranges::count_if(scaling->options, [&](std::string_view option) {
          return options.find(":" + std::string(option) + "=") != std::string::npos;
        });
        if (known == std::ranges::count(options, ':'))
          texts.push_back(quantizer(name + options).text);
      }
    }
  return texts;
}

inline std::vector<const Quantizer*> quantizers() {
  std::vector<const Quantizer*> all;
  for (const std::string& text : quantizer_texts()) all.push_back(&quantizer(text));
  return all;
}

/// These, and those whose scale the caller keeps.
inline std::vector<const Quantizer*> quantizers_and_delayed() {
  std::vector<const Quantizer*> all = quantizers();
  for (const char* text : {"fp8_e4m3:delayed", "fp8_e5m2:delayed"}) all.push_back(&quantizer(text));
  return all;
}

/// What one of them is given beside x: a seed and an offset, a scale, or nothing.
inline std::optional<at::Tensor> given_for(const Quantizer& quantizer) {
  if (quantizer.scaling->takes_scale) return at::scalar_tensor(3.0f, device());
  if (given_to(quantizer) != Given::seed) return std::nullopt;
  return at::tensor({int64_t{0x0123456789ABCDEF}, int64_t{3}}, at::kLong).to(device());
}

/// Calls `check(quantizer, x)`: each quantizer meets a seventh of the cases of `for_every_case`,
/// which has every pair of dtype, layout, row count and width in it; every case meets some of them.
/// Under AddressSanitizer a fifth of that.
template <typename Check>
void for_every_quantizer(const std::vector<const Quantizer*>& all, int64_t width_step,
                         Check&& check) {
  // No count of dtypes, layouts, row counts or widths has a factor of it.
  constexpr size_t kShare = kernel_ops::kSanitized ? 35 : 7;
  size_t index = 0;
  for_every_case(width_step, [&](const at::Tensor& x) {
    for (size_t q = index++ % kShare; q < all.size(); q += kShare) {
      SCOPED_TRACE(all[q]->text);
      check(*all[q], x);
    }
  });
}

/// As the name of a test.
inline std::string word_of(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return text;
}

}  // namespace tandem::testing
