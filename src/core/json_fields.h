// Untrusted JSON: parsed within bounds, read field by field with checks of types and ranges, and
// quoted in errors at bounded length.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/json_fwd.h"
#include "tandem/export.h"

namespace tandem {

/// Bounds of untrusted texts. No other file defines one.
namespace limits {
/// Bytes of one JSON text.
inline constexpr size_t kTextBytes = 64 << 20;
/// Depth of nested lists and objects.
inline constexpr size_t kDepth = 64;
/// Bytes of a label, a channel or an op's name.
inline constexpr size_t kNameBytes = 1024;
/// Ops of one pipeline.
inline constexpr size_t kOps = 65536;
/// Parameters of one pipeline.
inline constexpr size_t kParams = 131072;
/// Names in a list of fusions to make or to skip.
inline constexpr size_t kFusionNames = 1024;
/// Dimensions of a shape.
inline constexpr size_t kDimensions = 64;
}  // namespace limits

/// Returns a quotation of untrusted text for errors: printable ASCII, at most 120 characters.
TANDEM_API std::string shown(std::string_view text);
/// Returns a quotation of a JSON value for errors, in the form of `shown`.
TANDEM_API std::string shown_json(const nlohmann::json& value);

/// Whether the value is an integer in the range of int64_t.
bool is_int64(const nlohmann::json& value);

/// Whether JSON can hold the text.
TANDEM_API bool is_utf8(const std::string& text);

/// Parses `text`. Throws c10::ValueError, in the name of `what`, where it is no JSON, holds a
/// number that overflows, or exceeds `limits::kTextBytes` or `limits::kDepth`.
TANDEM_API nlohmann::json parse_json(std::string_view text, std::string_view what);

/// Reads named members of an object. An absent member leaves its default, and `finish` refuses
/// members that no call has read. All functions throw c10::ValueError with the text "<what>:
/// expected "<field>" to be ..., got ...".
class TANDEM_API Fields {
 public:
  /// The object must outlive this reader; null counts as {}.
  Fields(const nlohmann::json& object, std::string what);

  /// Returns the member, or null.
  const nlohmann::json* find(const char* name);
  /// Returns the member; throws where it is absent.
  const nlohmann::json& at(const char* name);

  Fields& get(const char* name, bool& value);
  /// Accepts finite numbers.
  Fields& get(const char* name, double& value);
  Fields& get(const char* name, uint64_t& value);
  /// Accepts integers in [least, greatest].
  Fields& get(const char* name, int64_t& value, int64_t least, int64_t greatest);
  Fields& get(const char* name, std::string& value, size_t most_bytes = limits::kNameBytes);
  Fields& get(const char* name, std::vector<std::string>& value, size_t most);
  /// Accepts lists of integers in [least, greatest].
  Fields& get(const char* name, std::vector<int64_t>& value, size_t most, int64_t least,
              int64_t greatest);
  Fields& get(const char* name, std::vector<double>& value, size_t most);

  void finish() const;

 private:
  [[noreturn]] void refuse(const char* name, const std::string& expected,
                           const nlohmann::json& got) const;
  template <typename T, typename Fits>
  Fields& list(const char* name, std::vector<T>& value, size_t most, const std::string& of,
               Fits&& fits);

  const nlohmann::json& object_;
  std::string what_;
  std::vector<std::string> known_;
};

}  // namespace tandem
