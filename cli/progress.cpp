#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tandem::cli {

namespace {

constexpr std::chrono::milliseconds kRedraw(100), kRepeat(10'000);  // on a terminal, in a log
constexpr int64_t kBarWidth = 20;

size_t terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

}  // namespace

Progress::Progress(bool enabled, int64_t total)
    : enabled_(enabled),
      terminal_(::isatty(STDERR_FILENO) != 0),
      total_(std::max<int64_t>(total, 1)) {}

Progress::~Progress() { finish(); }

bool Progress::due(bool last) {
  const auto now = std::chrono::steady_clock::now();
  if (!last && now - shown_ < (terminal_ ? kRedraw : kRepeat)) return false;
  shown_ = now;
  return true;
}

void Progress::show(const std::string& label, int64_t done, const std::string& details) {
  if (!enabled_ || !due(done >= total_)) return;
  const int64_t filled = std::clamp<int64_t>(kBarWidth * done / total_, 0, kBarWidth);
  std::string line = label + " [" + std::string(static_cast<size_t>(filled), '#') +
                     std::string(static_cast<size_t>(kBarWidth - filled), '.') + "] " +
                     std::to_string(done) + "/" + std::to_string(total_) + "  " + details;
  if (terminal_) {
    line.resize(
        std::min(line.size(), terminal_columns() - 1));  // a wrapped line could not be redrawn
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
    open_ = true;
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
}

void Progress::finish() {
  if (open_) std::fputc('\n', stderr);
  open_ = false;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace tandem::cli
