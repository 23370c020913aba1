// Entry of every C++ test program: GoogleTest's, but a run without a single test fails and skipped
// tests are counted at the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  if (testing::GTEST_FLAG(list_tests)) return result;
  const char* const shards = std::getenv("GTEST_TOTAL_SHARDS");
  const bool is_whole = shards == nullptr || std::string_view(shards) == "1";
  if (tests.test_to_run_count() == 0 && is_whole) {
    std::fprintf(stderr, "expected at least one test to run, got none. Is --gtest_filter right?\n");
    return 1;
  }
  std::printf("%d skipped\n", tests.skipped_test_count());
  return result;
}
