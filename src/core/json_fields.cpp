#include "core/json_fields.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace tandem {

namespace {

using nlohmann::json;

constexpr size_t kQuotedCharacters = 120;

bool is_finite(const json& value) {
  return value.is_number() && std::isfinite(value.get<double>());
}

bool is_text(const json& value, size_t most_bytes) {
  return value.is_string() && value.get_ref<const std::string&>().size() <= most_bytes;
}

std::string text_within(size_t bytes) {
  return "a text of at most " + std::to_string(bytes) + " bytes";
}

}  // namespace

std::string shown(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, kQuotedCharacters))
    result += c >= ' ' && c <= '~'
                  ? c
                  : '?';  // a message that ends within a UTF-8 character is not valid
  if (text.size() > kQuotedCharacters) result += "... (" + std::to_string(text.size()) + " bytes)";
  return result;
}

std::string shown_json(const json& value) {
  return shown(value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace));
}

namespace {

/// Returns the depth of nested lists and objects. A callback of the parser could count too, but in
/// time quadratic in the number of elements.
size_t depth_of(std::string_view text) {
  size_t depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if ((c == ']' || c == '}') && depth > 0) {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

bool is_int64(const json& value) {
  return value.is_number_unsigned()
             ? value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
             : value.is_number_integer();
}

bool is_utf8(const std::string& text) {
  try {
    json(text).dump();
    return true;
  } catch (const json::type_error&) {
    return false;
  }
}

json parse_json(std::string_view text, std::string_view what) {
  TORCH_CHECK_VALUE(text.size() <= limits::kTextBytes, what, ": expected JSON of at most ",
                    limits::kTextBytes, " bytes, got ", text.size(),
                    ". Cut the pipeline into several.");
  TORCH_CHECK_VALUE(depth_of(text) <= limits::kDepth, what, ": expected lists and objects at most ",
                    limits::kDepth,
                    " deep in one another, got more. Descriptions are made by the fronts.");
  try {
    return json::parse(text);
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, what, ": expected JSON, got ", shown(error.what()),
                      ". Descriptions are made by the fronts.");
  }
}

Fields::Fields(const json& object, std::string what) : object_(object), what_(std::move(what)) {
  TORCH_CHECK_VALUE(object.is_object() || object.is_null(), what_, ": expected a JSON object, got ",
                    shown_json(object), ". Pass {} for the defaults.");
}

const json* Fields::find(const char* name) {
  if (std::find(known_.begin(), known_.end(), name) == known_.end()) known_.emplace_back(name);
  if (!object_.is_object()) return nullptr;
  const auto member = object_.find(name);
  return member == object_.end() ? nullptr : &*member;
}

const json& Fields::at(const char* name) {
  const json* member = find(name);
  TORCH_CHECK_VALUE(member != nullptr, what_, ": expected a field \"", name, "\", got none in ",
                    shown_json(object_), ". Add it.");
  return *member;
}

void Fields::refuse(const char* name, const std::string& expected, const json& got) const {
  TORCH_CHECK_VALUE(false, what_, ": expected \"", name, "\" to be ", expected, ", got ",
                    shown_json(got), ". Correct it.");
}

Fields& Fields::get(const char* name, bool& value) {
  const json* member = find(name);
  if (member == nullptr) return *this;
  if (!member->is_boolean()) refuse(name, "true or false", *member);
  value = member->get<bool>();
  return *this;
}

Fields& Fields::get(const char* name, double& value) {
  const json* member = find(name);
  if (member == nullptr) return *this;
  if (!is_finite(*member)) refuse(name, "a finite number", *member);
  value = member->get<double>();
  return *this;
}

Fields& Fields::get(const char* name, uint64_t& value) {
  const json* member = find(name);
  if (member == nullptr) return *this;
  if (!member->is_number_unsigned()) refuse(name, "an integer from 0 to 2^64 - 1", *member);
  value = member->get<uint64_t>();
  return *this;
}

Fields& Fields::get(const char* name, int64_t& value, int64_t least, int64_t greatest) {
  const json* member = find(name);
  if (member == nullptr) return *this;
  if (!is_int64(*member) || member->get<int64_t>() < least || member->get<int64_t>() > greatest)
    refuse(name, "an integer from " + std::to_string(least) + " to " + std::to_string(greatest),
           *member);
  value = member->get<int64_t>();
  return *this;
}

Fields& Fields::get(const char* name, std::string& value, size_t most_bytes) {
  const json* member = find(name);
  if (member == nullptr) return *this;
  if (!is_text(*member, most_bytes)) refuse(name, text_within(most_bytes), *member);
  value = member->get<std::string>();
  return *this;
}

template <typename T, typename Fits>
Fields& Fields::list(const char* name, std::vector<T>& value, size_t most, const std::string& of,
                     Fits&& fits) {
  const json* member = find(name);
  if (member == nullptr) return *this;
  if (!member->is_array() || member->size() > most ||
      !std::all_of(member->begin(), member->end(), fits))
    refuse(name, "a list of at most " + std::to_string(most) + ", each " + of, *member);
  value = member->get<std::vector<T>>();
  return *this;
}

Fields& Fields::get(const char* name, std::vector<std::string>& value, size_t most) {
  return list(name, value, most, text_within(limits::kNameBytes),
              [](const json& entry) { return is_text(entry, limits::kNameBytes); });
}

Fields& Fields::get(const char* name, std::vector<int64_t>& value, size_t most, int64_t least,
                    int64_t greatest) {
  return list(name, value, most,
              "an integer from " + std::to_string(least) + " to " + std::to_string(greatest),
              [&](const json& entry) {
                return is_int64(entry) && entry.get<int64_t>() >= least &&
                       entry.get<int64_t>() <= greatest;
              });
}

Fields& Fields::get(const char* name, std::vector<double>& value, size_t most) {
  return list(name, value, most, "a finite number", is_finite);
}

void Fields::finish() const {
  if (!object_.is_object()) return;
  for (const auto& [name, value] : object_.items())
    TORCH_CHECK_VALUE(std::find(known_.begin(), known_.end(), name) != known_.end(), what_,
                      ": expected one of ", json(known_).dump(), ", got \"", shown(name),
                      "\". Remove it.");
}

}  // namespace tandem
