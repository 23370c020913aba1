#include "core/signature.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "core/json_fields.h"

namespace tandem {

namespace {

using nlohmann::json;

std::string quoted(const std::vector<std::string_view>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "\"" : ", \"") + std::string(word) + '"';
  return text;
}

/// Whether these are at most `limits::kDimensions` sizes, at most one of them -1, whose product is
/// below 2^63.
bool is_shape(const std::vector<int64_t>& sizes) {
  int64_t inferred = 0, elements = 1;
  for (const int64_t size : sizes) {
    inferred += size == -1;
    if (size < -1 || inferred > 1) return false;
    if (size > 0 && __builtin_mul_overflow(elements, size, &elements)) return false;
  }
  return sizes.size() <= limits::kDimensions;
}

std::optional<int64_t> whole(const json& value) {
  const bool is_large = value.is_number_unsigned() &&
                        value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
  if (!value.is_number_integer() || is_large) return std::nullopt;
  return value.get<int64_t>();
}

/// Whether JSON has the type of an option; `to` receives the value.
struct Reads {
  const json& from;

  bool operator()(bool& to) const {
    if (!from.is_boolean()) return false;
    to = from.get<bool>();
    return true;
  }
  bool operator()(double& to) const {
    if (!from.is_number()) return false;
    to = from.get<double>();
    return std::isfinite(to);
  }
  bool operator()(int64_t& to) const {
    const auto value = whole(from);
    to = value.value_or(0);
    return value.has_value();
  }
  bool operator()(std::string& to) const {
    if (!from.is_string()) return false;
    to = from.get<std::string>();
    return to.size() <= limits::kNameBytes;
  }
  bool operator()(std::vector<int64_t>& to) const {
    if (!from.is_array()) return false;
    to.clear();
    for (const json& entry : from) {
      const auto size = whole(entry);
      if (!size) return false;
      to.push_back(*size);
    }
    return true;
  }
};

}  // namespace

std::string expected(const OptionDef& option) {
  const Check& check = option.check;
  const bool is_whole = std::holds_alternative<int64_t>(option.otherwise);
  if (std::holds_alternative<bool>(option.otherwise)) return "true or false";
  if (!check.words.empty()) return "one of " + quoted(check.words);
  if (std::holds_alternative<std::string>(option.otherwise))
    return "a text of at most " + std::to_string(limits::kNameBytes) + " bytes";
  if (std::holds_alternative<std::vector<int64_t>>(option.otherwise))
    return "at most " + std::to_string(limits::kDimensions) +
           " sizes >= 0, one of which may be -1, of a product below 2^63";
  std::ostringstream text;
  text << (is_whole                     ? "a whole number"
           : std::isinf(check.greatest) ? "a finite number"
                                        : "a number");
  if (is_whole)
    text << " from " << static_cast<int64_t>(check.least) << " to "
         << static_cast<int64_t>(check.greatest);
  else if (!std::isinf(check.greatest))
    text << " from " << check.least << " to " << check.greatest;
  else if (!std::isinf(check.least))
    text << " >= " << check.least;
  return text.str();
}

bool allows(const OptionDef& option, const OptionValue& value) {
  const Check& check = option.check;
  if (const auto* number = std::get_if<double>(&value))
    return *number >= check.least && *number <= check.greatest;
  if (const auto* number = std::get_if<int64_t>(&value))
    return static_cast<double>(*number) >= check.least &&
           static_cast<double>(*number) <= check.greatest;
  if (const auto* text = std::get_if<std::string>(&value))
    return check.words.empty() || std::ranges::find(check.words, *text) != check.words.end();
  if (const auto* sizes = std::get_if<std::vector<int64_t>>(&value)) return is_shape(*sizes);
  return true;
}

json json_of(const OptionValue& value) {
  return std::visit([](const auto& alternative) { return json(alternative); }, value);
}

Options Signature::parse(std::string_view op, const json& options) const {
  Fields fields(options, std::string(op));
  const auto made = make_();
  for (const OptionDef& option : options_) {
    const std::string name(option.name);
    const json* given =
        option.check.is_required ? &fields.at(name.c_str()) : fields.find(name.c_str());
    if (given == nullptr) continue;
    OptionValue value = option.otherwise;
    TORCH_CHECK_VALUE(std::visit(Reads{*given}, value) && allows(option, value), op,
                      ": expected option ", name, " to be ", expected(option), ", got ",
                      shown_json(*given), ". ", name, ": ", option.doc, ".");
    option.set(made.get(), value);
  }
  fields.finish();
  return made;
}

OptionValues Signature::values(std::string_view op, const std::type_info& type,
                               const void* options) const {
  TORCH_CHECK_TYPE(type_ != nullptr && *type_ == type, op, ": expected ",
                   type_ == nullptr ? "no options" : "options as " + c10::demangle(type_->name()),
                   ", got ", c10::demangle(type.name()),
                   ". Give the struct that its signature is made of.");
  OptionValues values;
  for (const OptionDef& option : options_) values.emplace_back(option.name, option.get(options));
  return values;
}

}  // namespace tandem
