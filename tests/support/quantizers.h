// Every quantizer that tests go through: a row in the table of formats is tested without being
// named.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kernel_ops/format.h"

namespace tandem::testing {

/// Each format with each kind of scale that needs no state, and each of its options.
inline std::vector<std::string> quantizer_texts() {
  std::vector<std::string> texts;
  for (const FormatDef& format : formats())
    for (const ScalingDef* scaling : format.scalings) {
      if (scaling->takes_scale) continue;
      Quantizer options;
      options.format = &format;
      options.scaling = scaling;
      const auto add = [&] { texts.push_back(quantizer(options).text); };
      add();
      if (scaling->has_epsilon) {
        options.amax_epsilon = 0.5;
        add();
      }
      if (scaling->has_power_of_two) {
        options.power_of_two = true;
        add();
        options.amax_epsilon = 0;
        add();
      }
      if (scaling->has_square_blocks) {
        options.square_blocks = true;
        add();
      }
    }
  return texts;
}

inline std::vector<const Quantizer*> quantizers() {
  std::vector<const Quantizer*> all;
  for (const std::string& text : quantizer_texts()) all.push_back(&quantizer(text));
  return all;
}

/// As the name of a test.
inline std::string word_of(std::string text) {
  std::ranges::replace_if(
      text, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return text;
}

}  // namespace tandem::testing
