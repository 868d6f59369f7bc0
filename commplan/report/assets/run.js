"use strict";
// The panel of a recorded run: measured times of phases and plan lines, with their predictions. Its arguments are
// those of the panels in panels.js.
(() => {
  const { html, bytes, seconds, panels } = commplan;
  const { plural, remark, table, cell, lineButton } = commplan.parts;
  const MOST = 3; // most late ranks that are listed for a line
  const share = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`;

  // Cards for the summary: the duration of each phase, and the share of communication in it.
  panels.ran = (report) =>
    (report.measured ? report.measured.steps : []).map((steps) => {
      const hidden = steps.communicating > 0 ? 1 - steps.waiting / steps.communicating : 0;
      return html(
        "div",
        { class: "card ran" },
        html("h2", {}, `measured: ${steps.phase}`),
        html("p", { class: "figure" }, seconds(steps.seconds)),
        html("p", {}, `${plural(steps.count, "run")}, 95% within ${seconds(steps.p95)}`),
        html(
          "p",
          {},
          `communication ${share(steps.communicating)}, ${share(hidden)} of it overlapped with other work`,
        ),
      );
    });

  panels.run = (report, selection) => {
    const run = report.measured;
    if (!run) return [];
    const predicted = run.lines.some((line) => line.predicted !== null);
    const number = (text) => ({ text, number: true });
    const heads = ["line", "operation", number("bytes"), number("count"), number("median"), number("p95")];
    heads.push(number("transfer"));
    if (predicted) heads.push(number("predicted"), "measured / predicted");
    heads.push(number("bandwidth"), number("waiting"), "last rank");
    const rows = run.lines.map((line) =>
      html(
        "tr",
        {},
        html("td", {}, lineButton(line.line, selection)),
        cell(line.kind ? `${line.kind} via ${line.algorithm}` : `step ${line.name.match(/`(.*)`/)?.[1] ?? line.name}`),
        cell(line.nbytes ? bytes(line.nbytes) : "–", true),
        cell(line.count.toLocaleString("en"), true),
        cell(seconds(line.seconds), true),
        cell(seconds(line.p95), true),
        cell(line.kind && line.transfer ? seconds(line.transfer) : "–", true),
        ...(predicted ? compared(line) : []),
        cell(line.bandwidth ? commplan.rate(line.bandwidth) : "–", true),
        cell(line.waited ? seconds(line.waited) : "–", true),
        cell(last(line)),
      ),
    );
    const missing = run.ranks - run.recorded;
    return [
      html("h3", {}, "The run, line by line"),
      table(heads, rows, { label: "collectives of the run" }),
      missing ? remark(`${plural(missing, "rank")} of ${run.ranks} left no record.`) : null,
      run.lines.some((line) => !line.kind)
        ? remark("A step under JAX is recorded whole: its time includes the computation, which a prediction does not.")
        : null,
      run.lost ? remark(`The first ${plural(run.lost, "event")} have been overwritten.`) : null,
    ];
  };

  // Two cells: the predicted time, and a bar for the ratio of the measured time to it, with a mark at 1.
  function compared(line) {
    if (line.predicted === null || !line.transfer)
      return [cell(line.predicted === null ? "–" : seconds(line.predicted), true), cell("")];
    const times = line.transfer / line.predicted;
    const most = Math.max(2, times);
    const bar = html("span", { class: "against" }, html("span", { class: "share-text" }, `${Number(times.toPrecision(3)).toLocaleString("en")} ×`));
    bar.style.setProperty("--share", `${(100 * times) / most}%`);
    bar.style.setProperty("--once", `${100 / most}%`);
    return [cell(seconds(line.predicted), true), html("td", { class: "bar-cell" }, bar)];
  }

  // The ranks that arrived last at a line, with the number of times.
  function last(line) {
    const parts = line.last.slice(0, MOST).map(([rank, times]) => `rank ${rank}: ${times.toLocaleString("en")}`);
    if (line.last.length > MOST) parts.push(`${line.last.length - MOST} more`);
    if (line.unsure) parts.push(`unsure: ${line.unsure}`);
    return parts.join(", ");
  }
})();
