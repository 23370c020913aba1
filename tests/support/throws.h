// Errors by their text: what was expected, what was got, what to do.
#pragma once

#include <gmock/gmock.h>

namespace tandem::testing {

/// Matches a callable that throws an E whose message contains each of the texts.
template <typename E, typename... Texts>
auto ThrowsText(const Texts&... texts) {
  return ::testing::ThrowsMessage<E>(::testing::AllOf(::testing::HasSubstr(texts)...));
}

}  // namespace tandem::testing

/// Expects an expression to throw an E whose message contains each of the texts behind it.
#define EXPECT_ERROR(expression, E, ...) \
  EXPECT_THAT([&] { static_cast<void>(expression); }, ::tandem::testing::ThrowsText<E>(__VA_ARGS__))
