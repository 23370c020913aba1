// The arguments of a kernel op as a struct. Three things follow from it: the arguments of the op's
// schema, the types with which torch's dispatcher passes them, and the list of its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "quantization/formats/group.h"
#include "quantization/formats/quantizer.h"

/// Ends the `Args` of a kernel op, an aggregate: lists all members in their order. A schema calls
/// its arguments by these names.
#define TANDEM_ARGUMENTS(...)          \
  auto members() const {               \
    const auto& [__VA_ARGS__] = *this; \
    return std::tie(__VA_ARGS__);      \
  }                                    \
  auto members() {                     \
    auto& [__VA_ARGS__] = *this;       \
    return std::tie(__VA_ARGS__);      \
  }                                    \
  static constexpr std::string_view kMemberNames = #__VA_ARGS__;

namespace tandem::kernel_ops {

using at::Tensor;

/// The codes that a caller requests of one matrix that a kernel op computes or reads.
struct RequestedCodes {
  /// nullptr: no codes are requested.
  const Quantizer* quantizer = nullptr;
  /// The scale or the seed that the quantizer takes, if it takes any (given_to).
  std::optional<Tensor> given = {};
  GroupMask wanted = {};

  explicit operator bool() const { return quantizer != nullptr; }
};

/// Stands for the first tensor among the arguments where a result's index is expected.
inline constexpr size_t kFirstOperand = static_cast<size_t>(-1);

/// A member of Args that requests codes of result `kOf`, or of the first operand. Such members are
/// called "codes" or "<prefix>_codes" and stand after all others. For each, the op has a Group of
/// seven more results.
///
/// The dispatcher knows two overloads of such an op. The default one has neither these members nor
/// their results. The overload "codes" has `<name>_quantizer`, `<name>_given` and `<name>_wanted`
/// for each, and all results. If a result is masked out, an implementation may write its codes
/// without the result itself.
template <size_t kOf>
struct CodesOf : RequestedCodes {
  static constexpr size_t kResult = kOf;
  CodesOf() = default;
  CodesOf(RequestedCodes requested)  // NOLINT(google-explicit-constructor): kOf is the member's
      : RequestedCodes(std::move(requested)) {}
};

namespace detail {

/// Passes a member of Args as one argument of type `As`.
template <typename As, bool kOptional = false>
struct PassedAs {
  using Dispatched = std::tuple<As>;
  static constexpr bool kMayBeAbsent = kOptional;
  static Dispatched to(As member) { return {member}; }
  template <size_t kFirst, typename All>
  static As from(const All& given) {
    return std::get<kFirst>(given);
  }
};

/// How the dispatcher passes a member of Args: as arguments of the types `Dispatched`. `Member` is
/// the member's type in members(), without const.
template <typename Member>
struct Passed : PassedAs<Member> {};
template <>
struct Passed<Tensor> : PassedAs<const Tensor&> {};
template <>
struct Passed<std::optional<Tensor>> : PassedAs<const std::optional<Tensor>&, true> {};
template <>
struct Passed<std::optional<at::ScalarType>> : PassedAs<std::optional<at::ScalarType>, true> {};
template <>
struct Passed<at::OptionalSymIntArrayRef> : PassedAs<at::OptionalSymIntArrayRef, true> {};

/// A tensor that the op writes if it is present: a member `std::optional<Tensor>&`.
template <>
struct Passed<std::optional<Tensor>&> : Passed<std::optional<Tensor>> {
  template <size_t kFirst, typename All>
  static std::optional<Tensor>& from(const All& given) {
    return const_cast<std::optional<Tensor>&>(std::get<kFirst>(given));
  }
};

/// A quantizer is passed as its text.
template <>
struct Passed<Quantizer> {
  using Dispatched = std::tuple<std::string_view>;
  static constexpr bool kMayBeAbsent = false;
  static Dispatched to(const Quantizer& member) { return {member.text}; }
  template <size_t kFirst, typename All>
  static const Quantizer& from(const All& given) {
    return quantizer(std::string_view(std::get<kFirst>(given)));
  }
};

/// A quantizer that may be absent is passed as its text.
template <>
struct Passed<const Quantizer*> {
  using Dispatched = std::tuple<std::optional<std::string_view>>;
  static constexpr bool kMayBeAbsent = true;
  static Dispatched to(const Quantizer* member) {
    return {member == nullptr ? std::nullopt : std::optional<std::string_view>(member->text)};
  }
  template <size_t kFirst, typename All>
  static const Quantizer* from(const All& given) {
    const std::optional<std::string_view>& text = std::get<kFirst>(given);
    return text ? &quantizer(*text) : nullptr;
  }
};

template <size_t kOf>
struct Passed<CodesOf<kOf>> {
  using Dispatched =
      std::tuple<std::optional<std::string_view>, const std::optional<Tensor>&, GroupMask>;
  static constexpr bool kMayBeAbsent = false;
  static Dispatched to(const CodesOf<kOf>& member) {
    return {std::get<0>(Passed<const Quantizer*>::to(member.quantizer)), member.given,
            member.wanted};
  }
  template <size_t kFirst, typename All>
  static CodesOf<kOf> from(const All& given) {
    return RequestedCodes{Passed<const Quantizer*>::from<kFirst>(given),
                          std::get<kFirst + 1>(given), std::get<kFirst + 2>(given)};
  }
};

template <typename T>
inline constexpr bool kIsCodes = false;
template <size_t kOf>
inline constexpr bool kIsCodes<CodesOf<kOf>> = true;

/// `Passed` for one of the two overloads: the default one has no arguments for codes.
template <typename Member, bool kWithCodes>
struct PassedTo : Passed<Member> {};
template <size_t kOf>
struct PassedTo<CodesOf<kOf>, false> {
  using Dispatched = std::tuple<>;
  static constexpr bool kMayBeAbsent = true;
  static Dispatched to(const CodesOf<kOf>& /*member*/) { return {}; }
  template <size_t kFirst, typename All>
  static CodesOf<kOf> from(const All& /*given*/) {
    return {};
  }
};

template <typename Element>
inline constexpr bool kIsWritten =
    std::is_same_v<Element, Tensor&> || std::is_same_v<Element, std::optional<Tensor>&>;
/// The type of an element of members(), without const, and without reference unless the op writes
/// it.
template <typename Element>
using MemberType = std::conditional_t<kIsWritten<Element>, Element, std::remove_cvref_t<Element>>;

template <typename Tied, bool kWithCodes>
struct MemberList;
template <typename... Element, bool kWithCodes>
struct MemberList<std::tuple<Element...>, kWithCodes> {
  static constexpr size_t kCount = sizeof...(Element);
  template <size_t I>
  using At = MemberType<std::tuple_element_t<I, std::tuple<Element...>>>;
  template <size_t I>
  using PassedAt = PassedTo<At<I>, kWithCodes>;
  using Dispatched = decltype(std::tuple_cat(
      std::declval<typename PassedTo<MemberType<Element>, kWithCodes>::Dispatched>()...));
  /// By member: the index of its first argument in the schema.
  static constexpr std::array<size_t, kCount> kFirst = [] {
    constexpr std::array kSizes{
        std::tuple_size_v<typename PassedTo<MemberType<Element>, kWithCodes>::Dispatched>...};
    std::array<size_t, kCount> first{};
    for (size_t i = 1; i < kCount; ++i) first[i] = first[i - 1] + kSizes[i - 1];
    return first;
  }();
  static constexpr size_t kGroups =
      (size_t{0} + ... + size_t{kIsCodes<std::remove_cvref_t<Element>>});
};

/// The members of Args as a list of types, passed with codes or without.
template <typename Args, bool kWithCodes = true>
using MembersOf = MemberList<decltype(std::declval<const Args&>().members()), kWithCodes>;

/// Calls `function` with each member.
template <typename Args, typename Function>
C10_ALWAYS_INLINE void for_each_member(const Args& args, Function&& function) {
  std::apply([&](auto&... member) { (function(member), ...); }, args.members());
}

/// Calls `function(requested, index)` for each member that may request codes, in order.
template <typename Args, typename Function>
C10_ALWAYS_INLINE void for_each_codes(const Args& args, Function&& function) {
  [[maybe_unused]] size_t index = 0;
  for_each_member(args, [&](const auto& member) {
    if constexpr (kIsCodes<std::remove_cvref_t<decltype(member)>>) function(member, index++);
  });
}

/// Calls `function.operator()<Member>()` for the type of each member.
template <typename Members, typename Function>
void for_each_type(Function&& function) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    (function.template operator()<typename Members::template At<I>>(), ...);
  }
  (std::make_index_sequence<Members::kCount>());
}

/// The arguments in the form in which the dispatcher passes them.
template <bool kWithCodes, typename Args>
auto dispatched_of(const Args& args) {
  return std::apply(
      [](auto&... member) {
        return std::tuple_cat(PassedTo<MemberType<decltype(member)>, kWithCodes>::to(member)...);
      },
      args.members());
}

/// Args from the arguments that the dispatcher has passed.
template <typename Args, bool kWithCodes, typename Given>
Args args_from(const Given& given) {
  using Members = MembersOf<Args, kWithCodes>;
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return Args{Members::template PassedAt<I>::template from<Members::kFirst[I]>(given)...};
  }
  (std::make_index_sequence<Members::kCount>());
}

// The spelling of each type in a schema.

template <typename T>
std::string schema_type(const T*) = delete;
inline std::string schema_type(const Tensor*) { return "Tensor"; }
inline std::string schema_type(const std::optional<Tensor>*) { return "Tensor?"; }
inline std::string schema_type(const at::TensorList*) { return "Tensor[]"; }
inline std::string schema_type(const at::OptionalSymIntArrayRef*) { return "SymInt[]?"; }
inline std::string schema_type(const double*) { return "float"; }
inline std::string schema_type(const int64_t*) { return "int"; }
inline std::string schema_type(const bool*) { return "bool"; }
inline std::string schema_type(const std::string_view*) { return "str"; }
inline std::string schema_type(const at::ScalarType*) { return "ScalarType"; }
inline std::string schema_type(const std::optional<at::ScalarType>*) { return "ScalarType?"; }
inline std::string schema_type(const Quantizer*) { return "str"; }
inline std::string schema_type(const Quantizer* const*) { return "str?"; }
template <size_t N>
std::string schema_type(const std::array<bool, N>*) {
  return "bool[" + std::to_string(N) + "]";
}

/// Removes the first name from a list "a, b, c" and returns it.
inline std::string_view take_name(std::string_view& names) {
  const size_t end = names.find(',');
  const std::string_view name = names.substr(0, end);
  names.remove_prefix(end == std::string_view::npos ? names.size() : end + 2);
  return name;
}

/// The arguments of a schema. The trailing arguments that may be absent default to None.
template <typename Args, bool kWithCodes>
std::string schema_arguments() {
  using Members = MembersOf<Args, kWithCodes>;
  std::string_view names = Args::kMemberNames;
  std::array<std::string, Members::kCount> texts;
  size_t needed = 0;  // members up to the last one that must be given
  char alias = 'a';
  const auto spell = [&]<size_t I>(std::integral_constant<size_t, I>) {
    using Member = typename Members::template At<I>;
    const std::string name(take_name(names));
    if constexpr (kIsCodes<Member>) {
      if (kWithCodes)
        texts[I] =
            "str? " + name + "_quantizer, Tensor? " + name + "_given, bool[3] " + name + "_wanted";
    } else if constexpr (kIsWritten<Member>) {
      texts[I] =
          std::string("Tensor(") + alias++ + (Passed<Member>::kMayBeAbsent ? "!)? " : "!) ") + name;
    } else {
      texts[I] = schema_type(static_cast<const Member*>(nullptr)) + " " + name;
    }
    if (!Members::template PassedAt<I>::kMayBeAbsent) needed = I + 1;
  };
  [&]<size_t... I>(std::index_sequence<I...>) { (spell(std::integral_constant<size_t, I>()), ...); }
  (std::make_index_sequence<Members::kCount>());
  std::string all;
  for (size_t i = 0; i < texts.size(); ++i)
    if (!texts[i].empty())
      all.append(i == 0 ? "" : ", ").append(texts[i]).append(i < needed ? "" : "=None");
  return all;
}

/// Calls `function(tensor)` for each tensor among the arguments, with nullptr for an absent one.
template <typename Args, typename Function>
C10_ALWAYS_INLINE void for_each_tensor(const Args& args, Function&& function) {
  for_each_member(args, [&](const auto& member) {
    using Member = std::remove_cvref_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, Tensor>) {
      function(&member);
    } else if constexpr (std::is_same_v<Member, std::optional<Tensor>>) {
      function(member ? &*member : nullptr);
    } else if constexpr (std::is_same_v<Member, at::TensorList>) {
      for (const Tensor& each : member) function(&each);
    } else if constexpr (kIsCodes<Member>) {
      function(member.given ? &*member.given : nullptr);
    }
  });
}

/// The first tensor among the arguments. Every kernel op has one.
template <typename Args>
const Tensor& first_tensor(const Args& args) {
  const Tensor* first = nullptr;
  for_each_tensor(args, [&](const Tensor* tensor) {
    if (first == nullptr) first = tensor;
  });
  return *first;
}

}  // namespace detail
}  // namespace tandem::kernel_ops
