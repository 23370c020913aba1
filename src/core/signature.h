// The options of an op, each with a type, a default, a check and a line of documentation. They are
// written once, in the op's definition; the reader of descriptions, the fronts and docs/ops.md
// follow it.
#pragma once

#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "core/json_fwd.h"
#include "tandem/export.h"
#include "tandem/options.h"

namespace tandem {

/// The options of an op as the op's own struct, created once per plan.
using Options = std::shared_ptr<const void>;

/// The restriction of an option's values beyond its type.
struct Check {
  /// Bounds of a number.
  double least = -std::numeric_limits<double>::infinity();
  double greatest = std::numeric_limits<double>::infinity();
  /// The allowed values of a text; empty: any.
  std::vector<std::string_view> words = {};
  /// The user must set the option, as it has no default.
  bool is_required = false;
};
inline Check at_least(double least) { return {.least = least}; }
inline Check between(double least, double greatest) {
  return {.least = least, .greatest = greatest};
}
inline Check one_of(std::vector<std::string_view> words) { return {.words = std::move(words)}; }
inline Check required(Check check = {}) {
  check.is_required = true;
  return check;
}

/// An option as fronts see it. Its type is the type of its default.
struct OptionDef {
  std::string_view name;
  /// The default.
  OptionValue otherwise;
  Check check;
  std::string_view doc;
  std::function<OptionValue(const void* options)> get;
  std::function<void(void* options, const OptionValue& value)> set;
};

/// One line of a signature: a member of the struct of options, whose initial value is the default.
/// An enum becomes a text, with one word for each of its values in order.
template <typename T>
struct Option {
  template <typename Member>
  Option(std::string_view name, Member T::*member, Check check, std::string_view doc)
      : name(name), check(std::move(check)), doc(doc) {
    get = [member, words = this->check.words](const T& options) -> OptionValue {
      if constexpr (std::is_enum_v<Member>) {
        return std::string(words[static_cast<size_t>(options.*member)]);
      } else if constexpr (std::is_same_v<Member, size_t>) {
        return static_cast<int64_t>(options.*member);
      } else {
        return options.*member;
      }
    };
    set = [member, words = this->check.words](T& options, const OptionValue& value) {
      if constexpr (std::is_enum_v<Member>) {
        size_t place = 0;
        while (words[place] != std::get<std::string>(value)) ++place;
        options.*member = static_cast<Member>(place);
      } else if constexpr (std::is_same_v<Member, size_t>) {
        options.*member = static_cast<size_t>(std::get<int64_t>(value));
      } else {
        options.*member = std::get<Member>(value);
      }
    };
  }
  template <typename Member>
  Option(std::string_view name, Member T::*member, std::string_view doc)
      : Option(name, member, Check(), doc) {}

  std::string_view name;
  Check check;
  std::string_view doc;
  std::function<OptionValue(const T&)> get;
  std::function<void(T&, const OptionValue&)> set;
};

/// The options of an op. A default-constructed signature has none.
class TANDEM_API Signature {
 public:
  Signature() = default;
  template <typename T>
  Signature(T defaults, const std::vector<Option<std::type_identity_t<T>>>& options)
      : type_(&typeid(T)), make_([defaults] { return std::make_shared<T>(defaults); }) {
    for (const Option<T>& option : options)
      options_.push_back(
          {option.name, option.get(defaults), option.check, option.doc,
           [get = option.get](const void* from) { return get(*static_cast<const T*>(from)); },
           [set = option.set](void* to, const OptionValue& value) {
             set(*static_cast<T*>(to), value);
           }});
  }

  std::span<const OptionDef> options() const { return options_; }
  /// The type of the struct; null where the op has no options.
  const std::type_info* type() const { return type_; }

  /// Returns the struct of options. Throws c10::ValueError, in the name of `op`, for an unknown
  /// option, one that is missing or given twice, and a value that its check refuses.
  Options parse(std::string_view op, const OptionValues& options) const;

  /// Converts a struct of type `type` to options. Throws c10::TypeError, in the name of `op`, where
  /// the signature has another struct.
  OptionValues values(std::string_view op, const std::type_info& type, const void* options) const;

 private:
  const std::type_info* type_ = nullptr;
  std::function<std::shared_ptr<void>()> make_ = [] { return nullptr; };
  std::vector<OptionDef> options_;
};

/// Returns words that follow "to be", such as "a number from 0 to 1".
TANDEM_API std::string expected(const OptionDef& option);

/// Whether the check of an option accepts a value of the option's type.
TANDEM_API bool allows(const OptionDef& option, const OptionValue& value);

TANDEM_API nlohmann::json json_of(const OptionValue& value);
nlohmann::json json_of(const OptionValues& options);

/// Reads the members of an object as options; null counts as {}. Throws c10::ValueError, in the
/// name of `op`, for a value of no option's type, such as null or a list of texts.
TANDEM_API OptionValues options_from_json(std::string_view op, const nlohmann::json& object);

/// A size from which the shapes of parameters are built. The code that creates an op passes it; it
/// is no option, because the parameters show it.
struct SizeDef {
  std::string_view name, doc;
};

/// A parameter: its shape in sizes of the definition, and its first values.
struct ParamDef {
  enum class Init : uint8_t {
    zeros,
    ones,
    /// U(-1/sqrt(n), 1/sqrt(n)), where n is the last size.
    kaiming_uniform
  };
  ParamDef(const char* name)
      : name(name) {}  // NOLINT: a name alone is a parameter that fronts do not create
  ParamDef(std::string_view name, std::vector<std::string_view> shape = {}, Init init = Init::zeros,
           std::string_view zeros_if = {})
      : name(name), shape(std::move(shape)), init(init), zeros_if(zeros_if) {}

  std::string_view name;
  std::vector<std::string_view> shape;
  Init init = Init::zeros;
  /// The name of an option that makes the parameter start at zero.
  std::string_view zeros_if = {};
};

}  // namespace tandem
