// Untrusted JSON: parsed within bounds, read field by field with types and ranges checked, quoted
// in errors at bounded length.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/json_fwd.h"
#include "tandem/export.h"

namespace tandem {

/// What a text that is read may hold at most. The one place that says so.
namespace limits {
/// Of one JSON text.
inline constexpr size_t kTextBytes = 64 << 20;
/// Of lists and objects in one another.
inline constexpr size_t kDepth = 64;
/// Of a label, a channel, an op's name.
inline constexpr size_t kNameBytes = 1024;
/// Of one pipeline.
inline constexpr size_t kOps = 65536;
/// Of one pipeline.
inline constexpr size_t kParams = 131072;
/// In a list of fusions to make or to skip.
inline constexpr size_t kFusionNames = 1024;
/// Of a shape.
inline constexpr size_t kDimensions = 64;
}  // namespace limits

/// Text of unknown origin as errors quote it: printable ASCII, at most 120 characters.
TANDEM_API std::string shown(std::string_view text);
/// The same of a JSON value.
TANDEM_API std::string shown_json(const nlohmann::json& value);

/// Parses `text`. Throws c10::ValueError, in the name of `what`, where it is no JSON, holds a
/// number that overflows, or exceeds `limits::kTextBytes` or `limits::kDepth`.
TANDEM_API nlohmann::json parse_json(std::string_view text, std::string_view what);

/// Reads named members of an object. A member that is absent leaves its default; `finish` refuses
/// those that nobody read. All throw c10::ValueError: "<what>: expected "<field>" to be ..., got
/// ...".
class TANDEM_API Fields {
 public:
  /// `object`: null counts as {}. Must outlive the reader.
  Fields(const nlohmann::json& object, std::string what);

  /// The member, or null.
  const nlohmann::json* find(const char* name);
  /// The member, which must be there.
  const nlohmann::json& at(const char* name);

  Fields& get(const char* name, bool& value);
  /// Finite.
  Fields& get(const char* name, double& value);
  Fields& get(const char* name, uint64_t& value);
  /// In [least, greatest].
  Fields& get(const char* name, int64_t& value, int64_t least, int64_t greatest);
  Fields& get(const char* name, std::string& value, size_t most_bytes = limits::kNameBytes);
  Fields& get(const char* name, std::vector<std::string>& value, size_t most);
  /// Integers in [least, greatest].
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
