"use strict";
// Panels: choices with their rejected alternatives, the ops of each plan line, and proofs. Their arguments are
// those of the panels in panels.js.
(() => {
  const { html, bytes, seconds, panels } = commplan;
  const { percent, busiest, leftOut, remark, ticked, sentences, table, cell, lineButton } = commplan.parts;

  // The quantity in the seconds of a choice, as in `Choice.measure` of commplan/ir/remark.py.
  const measure = (choice) =>
    choice.by === "search" ? "exposed" : choice.by === "share" ? "a step takes" : "alone";

  panels.choices = (report, selection) => {
    if (!report.choices.length) return [remark("No pass made a choice.")];
    const line = (choice) => (choice.span ? choice.span.line : Infinity);
    const byLine = [...report.choices].sort((a, b) => line(a) - line(b) || 0);
    return [...byLine.map((choice) => chosen(choice, selection)), leftOut(report.choices_left_out)].filter(
      Boolean,
    );
  };

  // A choice: its reason, and a table of alternatives.
  function chosen(choice, selection) {
    const line = choice.span ? choice.span.line : 0;
    const rows = [];
    if (choice.alternatives.length) {
      const most = Math.max(choice.seconds || 0, ...choice.alternatives.map((way) => way.seconds || 0));
      const row = (way, time, why, taken) =>
        html(
          "tr",
          { class: taken ? "taken" : null },
          cell(taken ? "chosen" : "rejected"),
          cell(way),
          cell(time === null ? "not known" : seconds(time), true),
          html("td", { class: "bar-cell" }, time === null || !most ? null : bar(time / most)),
          cell(ticked(why)),
        );
      if (choice.seconds !== null) rows.push(row("as above", choice.seconds, choice.source, true));
      rows.push(
        ...choice.alternatives.map((way) => {
          const why = [compared(way.seconds, choice.seconds), way.why].filter(Boolean).join("; ");
          return row(way.what, way.seconds, why, false);
        }),
      );
    }
    return html(
      "article",
      { class: "choice" },
      html(
        "h3",
        {},
        lineButton(line, selection),
        html("span", { class: "pass" }, choice.by),
        ticked(` chose ${choice.what}`),
      ),
      html("p", {}, ticked(choice.why)),
      choice.seconds !== null && !rows.length
        ? remark(`${measure(choice)} ${seconds(choice.seconds)}${choice.source ? ` (${choice.source})` : ""}`)
        : null,
      rows.length
        ? table(["", "what", { text: measure(choice), number: true }, "", "why"], rows, {
            label: `alternatives of ${choice.what}`,
          })
        : null,
      choice.sharing.length ? sharing(choice) : null,
      choice.rejected.length
        ? html(
            "ul",
            { class: "rejected" },
            choice.rejected.map((text) =>
              html("li", {}, html("span", { class: "verdict" }, "rejected "), ticked(text)),
            ),
          )
        : null,
    );
  }

  // A bar for a part from 0 to 1.
  const bar = (part) => {
    const filled = html("span", { class: "share", "aria-hidden": "true" });
    filled.style.setProperty("--share", percent(part));
    return filled;
  };

  // The ratio of a time to that of the choice, as `compared` of commplan/explain/times.py; "" if one is unknown.
  function compared(time, taken) {
    if (time === null || !taken) return "";
    const longer = time / taken;
    if (Math.abs(longer - 1) < 0.005) return "as long";
    if (longer >= 2) return `${Number(longer.toPrecision(3))} times as long`;
    return `${Math.round(Math.abs(longer - 1) * 100)}% ${longer > 1 ? "longer" : "less"}`;
  }

  // The table of the designs of a sharing choice, as `sharing_table` of commplan/explain/report.py.
  function sharing(choice) {
    const rows = choice.sharing.map((way) =>
      html(
        "tr",
        { class: way.taken ? "taken" : null },
        cell(way.taken ? "chosen" : "rejected"),
        cell(way.readers ? `${way.design}(readers = ${way.readers})` : way.design),
        cell(way.cut || "before reading"),
        cell(seconds(way.cpu), true),
        cell(`${way.distance.toFixed(2)} ×`, true),
        cell(seconds(way.wall), true),
        cell(way.waits_for),
        cell(bytes(way.nbytes), true),
        cell(bytes(way.memory), true),
      ),
    );
    const number = (text) => ({ text, number: true });
    return html(
      "div",
      {},
      remark(`physical limit: ${seconds(choice.sharing[0].limit)} of CPU per record and member`),
      table(
        [
          "",
          "design",
          "members part",
          number("CPU"),
          number("of the limit"),
          number("step"),
          "waits for",
          number("between hosts"),
          number("memory"),
        ],
        rows,
        { label: "designs of sharing" },
      ),
    );
  }

  panels.lines = (report, selection) => {
    if (!report.lines.length)
      return [remark("This schedule does not contain the plan that it was compiled from.")];
    const totals = new Map();
    for (const line of report.lines)
      totals.set(line.phase, (totals.get(line.phase) || 0) + (line.seconds || 0));
    const parts = [];
    let phase = null;
    for (const line of report.lines) {
      if (line.phase !== phase) {
        phase = line.phase;
        parts.push(html("h3", {}, phase));
      }
      const time = line.seconds
        ? `${seconds(line.seconds)}, ${percent(line.seconds / totals.get(phase))} of its operations' time`
        : "";
      const details = html(
        "details",
        { open: report.lines.length <= 40 },
        html(
          "summary",
          {},
          html("code", {}, line.stage),
          time ? html("span", { class: "became-time" }, time) : null,
        ),
        sentences(line.became, null),
      );
      parts.push(html("div", { class: "became" }, lineButton(line.line, selection), details));
    }
    if (report.lines_left_out) parts.push(leftOut(report.lines_left_out));
    return parts;
  };

  panels.proofs = (report, selection) => {
    const { proofs } = report;
    const list = (title, kind, texts) =>
      texts.length
        ? html("div", { class: `claim claim-${kind}` }, html("h3", {}, title), sentences(texts, null))
        : null;
    const number = (text) => ({ text, number: true });
    const rows = proofs.collectives.map((each) =>
      html(
        "tr",
        {},
        html("td", {}, lineButton(each.line, selection)),
        cell(each.count > 1 ? `${each.kind} × ${each.count}` : each.kind),
        cell(`${each.axes.join(", ")} (${each.ranks.toLocaleString("en")})`),
        cell(each.algorithm),
        cell(each.rounds === null ? "" : String(each.rounds), true),
        cell(each.busiest === null ? "" : bytes(each.busiest), true),
        cell(each.least === null ? "" : bytes(each.least), true),
        html("td", { class: each.proof.startsWith("assumed") ? "assumed" : "holds" }, each.proof),
      ),
    );
    return [
      html(
        "div",
        { class: "claims" },
        list("proved", "proved", [proofs.proved]),
        list("assumed", "assumed", proofs.assumed),
        list("not checked", "unseen", proofs.not_checked),
      ),
      rows.length
        ? table(
            [
              "line",
              "collective",
              "over",
              "via",
              number("rounds"),
              number("busiest rank"),
              number("at least"),
              "proof",
            ],
            rows,
            { label: "proofs of collectives" },
          )
        : null,
      proofs.facts.length ? sentences(proofs.facts, "sentences") : null,
      leftOut(proofs.left_out),
    ].filter(Boolean);
  };
})();
