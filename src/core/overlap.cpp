#include "core/overlap.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace tandem {

namespace {

/// count * stride for every count from `least` to `most`.
struct Term {
  int64_t stride, least, most;
};
using Terms = c10::SmallVector<Term, 16>;

int64_t address_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.const_data_ptr()));
}

void add_term(Terms& terms, const Term& term) {
  const auto same = std::find_if(terms.begin(), terms.end(),
                                 [&](const Term& known) { return known.stride == term.stride; });
  if (same == terms.end()) {
    terms.push_back(term);
  } else {
    same->least += term.least;
    same->most += term.most;
  }
}

void add_dims(Terms& terms, const at::Tensor& tensor, bool negated) {
  const int64_t item = static_cast<int64_t>(tensor.element_size());
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const int64_t last = tensor.size(d) - 1;
    if (last > 0 && tensor.stride(d) != 0)
      add_term(terms, {tensor.stride(d) * item, negated ? -last : 0, negated ? 0 : last});
  }
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

/// Whether one multiple of each term, beginning with `next`, can be chosen so that their sum is
/// `sum`. Terms are sorted by descending stride, so that later terms can correct little and few
/// counts have to be tried. If the search takes too long, the answer is yes.
bool adds_up(const Terms& terms, size_t next, int64_t sum, int& budget) {
  if (next == terms.size()) return sum == 0;
  if (--budget < 0) return true;
  int64_t least = 0, most = 0;  // bounds of the sum of the other terms
  for (size_t t = next + 1; t < terms.size(); ++t) {
    least += terms[t].stride * terms[t].least;
    most += terms[t].stride * terms[t].most;
  }
  const Term& term = terms[next];
  const int64_t from = std::max(term.least, -floor_div(most - sum, term.stride));
  const int64_t to = std::min(term.most, floor_div(sum - least, term.stride));
  for (int64_t count = from; count <= to; ++count)
    if (adds_up(terms, next + 1, sum - count * term.stride, budget)) return true;
  return false;
}

}  // namespace

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.device() != b.device()) return false;
  Terms terms;
  add_dims(terms, a, /*negated=*/false);
  add_dims(terms, b, /*negated=*/true);
  add_term(terms, {1, 1 - static_cast<int64_t>(b.element_size()),
                   static_cast<int64_t>(a.element_size()) - 1});
  std::sort(terms.begin(), terms.end(),
            [](const Term& one, const Term& other) { return one.stride > other.stride; });
  int budget = 1000;
  return adds_up(terms, 0, address_of(b) - address_of(a), budget);
}

bool same_elements(const at::Tensor& a, const at::Tensor& b) {
  if (address_of(a) != address_of(b) || a.element_size() != b.element_size() ||
      a.sizes() != b.sizes())
    return false;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

}  // namespace tandem
