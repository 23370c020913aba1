#include "report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "program/strings.h"

namespace tandem::apps {

namespace {

using nlohmann::json;
using Cells = std::vector<std::string>;

const Cells kHeadings{"run",           "validation",        "less first",   "speed",
                      "speed / first", "kept for backward", "kept / first", "peak memory"};
const Cells kUnits{"", "bits/byte", "bits/byte", "tokens/s", "", "bytes/token", "", ""};

std::string ratio(double value, double first) {
  return format("%.2f", value / std::max(first, 1e-9));
}

Cells cells_of(const RunResult& result, const RunResult& first) {
  return {result.run,
          format("%.4f", result.validation_bits_per_byte),
          format("%+.4f", result.validation_bits_per_byte - first.validation_bits_per_byte),
          format("%.0f", result.tokens_per_second),
          ratio(result.tokens_per_second, first.tokens_per_second),
          format("%.0f", result.saved_bytes_per_token),
          ratio(result.saved_bytes_per_token, first.saved_bytes_per_token),
          bytes_text(result.peak_memory_bytes)};
}

std::string table_html(const std::vector<RunResult>& results) {
  std::string html = "<table>\n<tr>";
  for (size_t i = 0; i < kHeadings.size(); ++i)
    html += "<th>" + kHeadings[i] + "<br><small>" + kUnits[i] + "</small></th>";
  html += "</tr>\n";
  for (const RunResult& result : results) {
    html += "<tr>";
    for (const std::string& cell : cells_of(result, results.front()))
      html += "<td>" + html_escape(cell) + "</td>";
    html += "</tr>\n";
  }
  return html + "</table>\n";
}

/// A step of 1, 2 or 5 times a power of ten that divides `range` into about `parts`.
double tick_step(double range, double parts) {
  const double rough = range / parts, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (rough <= factor * power) return factor * power;
  }
  return 10 * power;
}

/// Loss curves with axes, in the page's colours.
class LossChart {
 public:
  explicit LossChart(const json& log) : log_(log) {
    double least = INFINITY, most = -INFINITY;
    for (const json& row : log) {
      const double loss = row.at("bits_per_byte");
      if (!std::isfinite(loss)) continue;
      least = std::min(least, loss);
      most = std::max(most, loss);
      last_step_ = std::max(last_step_, row.at("step").get<double>());
    }
    if (least > most) least = 0, most = 1;
    y_step_ = tick_step(std::max(most - least, 0.1), 6);
    low_ = std::floor(least / y_step_) * y_step_;
    high_ = std::max(std::ceil(most / y_step_) * y_step_, low_ + y_step_);
  }

  std::string svg() const {
    std::string svg = format(
        "<svg class=\"chart\" viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"Training loss of "
        "each run\">\n",
        kWidth, kHeight);
    svg += axes();
    Cells runs;
    for (const json& row : log_) {
      const std::string run = row.at("run");
      if (std::find(runs.begin(), runs.end(), run) == runs.end()) runs.push_back(run);
    }
    for (size_t i = 0; i < runs.size(); ++i) svg += curve(runs[i], i);
    return svg + "</svg>\n";
  }

 private:
  static constexpr double kWidth = 760, kHeight = 380, kLeft = 60, kRight = 16, kTop = 12,
                          kBottom = 48;

  double x(double step) const { return kLeft + (kWidth - kLeft - kRight) * step / last_step_; }
  double y(double loss) const {
    return kTop + (kHeight - kTop - kBottom) * (high_ - loss) / (high_ - low_);
  }

  std::string axes() const {
    std::string svg;
    const double bottom = kHeight - kBottom, right = kWidth - kRight;
    for (int i = 0; low_ + i * y_step_ <= high_ + y_step_ / 2; ++i) {
      const double loss = low_ + i * y_step_;
      svg += format("<line class=\"grid\" x1=\"%g\" y1=\"%.1f\" x2=\"%g\" y2=\"%.1f\"/>", kLeft,
                    y(loss), right, y(loss));
      svg += format("<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", kLeft - 6,
                    y(loss) + 4, loss);
    }
    const double step = std::max(tick_step(last_step_, 8), 1.0);
    for (double s = 0; s <= last_step_ + 1e-9; s += step) {
      svg += format("<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%g</text>\n", x(s),
                    bottom + 18, s);
    }
    svg += format("<path class=\"axis\" d=\"M%g %gV%gH%g\"/>", kLeft, kTop, bottom, right);
    svg += format("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">step</text>\n",
                  (kLeft + right) / 2, kHeight - 8);
    svg += format(
        "<text transform=\"translate(16 %g) rotate(-90)\" text-anchor=\"middle\">training loss, "
        "bits per byte</text>\n",
        (kTop + bottom) / 2);
    return svg;
  }

  std::string curve(const std::string& run, size_t index) const {
    std::string points;
    for (const json& row : log_) {
      if (row.at("run") == run && std::isfinite(row.at("bits_per_byte").get<double>())) {
        points += format("%.1f,%.1f ", x(row.at("step")), y(row.at("bits_per_byte")));
      }
    }
    const double legend_y = kTop + 16 + 20 * static_cast<double>(index),
                 legend_x = kWidth - kRight - 110;
    return format("<polyline class=\"curve run%zu\" points=\"%s\"/>\n", index, points.c_str()) +
           format(
               "<line class=\"curve run%zu\" x1=\"%g\" y1=\"%g\" x2=\"%g\" y2=\"%g\"/><text "
               "x=\"%g\" y=\"%g\">%s</text>\n",
               index, legend_x, legend_y, legend_x + 28, legend_y, legend_x + 36, legend_y + 4,
               html_escape(run).c_str());
  }

  const json& log_;
  double last_step_ = 1, low_ = 0, high_ = 1, y_step_ = 1;
};

constexpr const char* kStyle = R"(
:root {
  color-scheme: light dark;
  --ink: #1c2127; --paper: #ffffff; --faint: #d5dae0;
  --run0: #1b6ac9; --run1: #c2520a; --run2: #1a7f4b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ec; --paper: #14181c; --faint: #3a424b;
    --run0: #6cb0ff; --run1: #ff9d57; --run2: #58c98b;
  }
}
body {
  color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif;
  max-width: 880px; margin: 2em auto; padding: 0 1em;
}
h1 { font-size: 1.5em; }
h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { padding: .3em .9em; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; }
small { font-weight: normal; opacity: .75; }
pre { white-space: pre-wrap; border-left: 3px solid var(--faint); padding-left: 1em; }
svg { max-width: 100%; height: auto; }
.plan { overflow-x: auto; background: #ffffff; border: 1px solid var(--faint); border-radius: 6px; }
.chart text { fill: var(--ink); font-size: 12px; }
.chart .grid { stroke: var(--faint); }
.chart .axis { stroke: var(--ink); fill: none; }
.chart .curve { fill: none; stroke-width: 1.8; }
.run0 { stroke: var(--run0); }
.run1 { stroke: var(--run1); stroke-dasharray: 7 3; }
.run2 { stroke: var(--run2); stroke-dasharray: 2 3; }
.run3 { stroke: var(--run0); stroke-dasharray: 9 3 2 3; }
.run4 { stroke: var(--run1); }
.run5 { stroke: var(--run2); stroke-dasharray: 9 3; }
.run6 { stroke: var(--run0); stroke-dasharray: 2 2; }
.run7 { stroke: var(--run1); stroke-dasharray: 2 5; }
.run8 { stroke: var(--run2); }
.inspection text { fill: var(--ink); font-size: 12px; }
.inspection .curve { fill: none; stroke-width: 1.2; }
.inspection .grid { stroke: var(--faint); }
.inspection .bad { fill: var(--run1); }
)";

}  // namespace

std::string results_table(const std::vector<RunResult>& results) {
  std::vector<Cells> lines{kHeadings, kUnits};
  for (const RunResult& result : results) lines.push_back(cells_of(result, results.front()));
  std::string table;
  for (const Cells& line : lines) {
    for (size_t column = 0; column < line.size(); ++column) {
      size_t width = 0;
      for (const Cells& other : lines) width = std::max(width, other[column].size());
      const std::string padding(width - line[column].size(), ' ');
      table += column == 0 ? line[column] + padding : "   " + padding + line[column];
    }
    table += '\n';
  }
  return table;
}

std::string report_html(const Report& report) {
  std::string body = "<h1>tandem train</h1>\n<p>" + html_escape(report.title) + "</p>\n";
  body += "<h2>Loss</h2>\n" + LossChart(*report.log).svg();
  body += "<h2>Results</h2>\n" + table_html(report.results);
  if (!report.plan_svg.empty()) {
    const size_t begin = std::min(report.plan_svg.find("<svg"),
                                  report.plan_svg.size());  // an XML declaration may precede it
    body += "<h2>Plan of one layer</h2>\n<div class=\"plan\">" + report.plan_svg.substr(begin) +
            "</div>\n";
  }
  if (!report.inspection_svg.empty())
    body += "<h2>What quantizing does to each tensor</h2>\n" + report.inspection_svg;
  body +=
      "<h2>Text drawn from the last model</h2>\n<pre>" + html_escape(report.sample) + "</pre>\n";
  return html_page("tandem train", kStyle, body);
}

}  // namespace tandem::apps
