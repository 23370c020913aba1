#include "core/signature.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
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

/// A value for errors. JSON has no NaN and no infinity.
std::string shown_option(const OptionValue& value) {
  const auto* number = std::get_if<double>(&value);
  if (number != nullptr && !std::isfinite(*number)) return std::to_string(*number);
  return shown_json(json_of(value));
}

/// Whether a value has the type of an option, or is a whole number for a number; `to` receives it.
struct Reads {
  const OptionValue& from;

  bool operator()(double& to) const {
    const auto* whole = std::get_if<int64_t>(&from);
    to = whole != nullptr                       ? static_cast<double>(*whole)
         : std::holds_alternative<double>(from) ? std::get<double>(from)
                                                : std::nan("");
    return std::isfinite(to);
  }
  bool operator()(std::string& to) const {
    const auto* text = std::get_if<std::string>(&from);
    if (text == nullptr || text->size() > limits::kNameBytes || !is_utf8(*text)) return false;
    to = *text;
    return true;
  }
  template <typename T>
  bool operator()(T& to) const {
    const auto* value = std::get_if<T>(&from);
    if (value != nullptr) to = *value;
    return value != nullptr;
  }
};

}  // namespace

std::string expected(const OptionDef& option) {
  const Check& check = option.check;
  const bool is_whole = std::holds_alternative<int64_t>(option.otherwise);
  if (std::holds_alternative<bool>(option.otherwise)) return "true or false";
  if (!check.words.empty()) return "one of " + quoted(check.words);
  if (std::holds_alternative<std::string>(option.otherwise))
    return "a text of at most " + std::to_string(limits::kNameBytes) + " bytes in UTF-8";
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

json json_of(const OptionValues& options) {
  json object = json::object();
  for (const auto& [name, value] : options) object[name] = json_of(value);
  return object;
}

OptionValues options_from_json(std::string_view op, const json& object) {
  TORCH_CHECK_VALUE(object.is_object() || object.is_null(), op, ": expected a JSON object, got ",
                    shown_json(object), ". Pass {} for the defaults.");
  OptionValues options;
  for (const auto& [name, value] : object.items()) {
    OptionValue& option = options.emplace_back(name, OptionValue()).second;
    if (value.is_boolean())
      option = value.get<bool>();
    else if (is_int64(value))
      option = value.get<int64_t>();
    else if (value.is_number())
      option = value.get<double>();
    else if (value.is_string())
      option = value.get<std::string>();
    else if (value.is_array() && std::ranges::all_of(value, is_int64))
      option = value.get<std::vector<int64_t>>();
    else
      TORCH_CHECK_VALUE(false, op, ": expected option ", shown(name), " to be true, false, ",
                        "a number, a text or a list of whole numbers, got ", shown_json(value),
                        ". Correct it.");
  }
  return options;
}

Options Signature::parse(std::string_view op, const OptionValues& options) const {
  std::vector<std::string> known;
  const auto made = make_();
  for (const OptionDef& option : options_) {
    const std::string& name = known.emplace_back(option.name);
    const auto given = std::ranges::find(options, name, &OptionValues::value_type::first);
    TORCH_CHECK_VALUE(given != options.end() || !option.check.is_required, op,
                      ": expected a field \"", name, "\", got none in ",
                      shown_json(json_of(options)), ". Add it.");
    if (given == options.end()) continue;
    TORCH_CHECK_VALUE(std::ranges::count(options, name, &OptionValues::value_type::first) == 1, op,
                      ": expected option ", name, " once, got it twice. Leave one out.");
    OptionValue value = option.otherwise;
    TORCH_CHECK_VALUE(std::visit(Reads{given->second}, value) && allows(option, value), op,
                      ": expected option ", name, " to be ", expected(option), ", got ",
                      shown_option(given->second), ". ", name, ": ", option.doc, ".");
    option.set(made.get(), value);
  }
  for (const auto& [name, value] : options)
    TORCH_CHECK_VALUE(std::ranges::find(known, name) != known.end(), op, ": expected one of ",
                      json(known).dump(), ", got \"", shown(name), "\". Remove it.");
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
