// The values of an op's options.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tandem {

/// The value of an option; the alternative is its type. A list of numbers is a shape, one size of
/// which may be -1.
using OptionValue = std::variant<bool, double, int64_t, std::string, std::vector<int64_t>>;

/// Options by name.
using OptionValues = std::vector<std::pair<std::string, OptionValue>>;

}  // namespace tandem
