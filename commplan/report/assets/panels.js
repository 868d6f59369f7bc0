"use strict";
// Panels: summary, plan, graph, timeline, links. Each is a function of the document (commplan/report/document.py
// defines its fields) and the selection (selection.js), and returns the elements of its section.
(() => {
  const { html, bytes, seconds } = commplan;
  const { percent, plural, busiest, leftOut, remark, table, cell, lineButton } = commplan.parts;
  const panels = {};
  commplan.panels = panels;

  // The phase to show first: `step`, or else the first phase that is not `start`, or else the first.
  const mainPhase = (phases, name) =>
    phases.find((each) => name(each) === "step") ||
    phases.find((each) => name(each) !== "start") ||
    phases[0];
  panels.summary = (report) => {
    const cards = report.phases
      .filter((phase) => phase.seconds > 0)
      .map((phase) => {
        const moved = busiest(phase.nbytes)
          .map(([level, size]) => `${level} ${bytes(size)}`)
          .join(", ");
        return html(
          "div",
          { class: "card" },
          html("h2", {}, phase.title),
          html("p", { class: "figure" }, seconds(phase.exposed)),
          ...phase.times.map((text) => html("p", {}, text)),
          html("p", {}, `communication ${seconds(phase.network)}, other work ${seconds(phase.compute)}`),
          moved ? html("p", {}, `busiest links: ${moved}`) : null,
        );
      });
    const proved = html(
      "div",
      { class: "card proved" },
      html("h2", {}, "proved"),
      html("p", { class: "figure-text" }, report.proofs.proved),
      html(
        "p",
        {},
        `${plural(report.proofs.assumed.length, "assumption")}, ${plural(report.proofs.not_checked.length, "thing")} not checked`,
      ),
    );
    const facts = html(
      "dl",
      { class: "facts" },
      report.facts.map(([name, text]) => html("div", {}, html("dt", {}, name), html("dd", {}, text))),
    );
    return [facts, html("div", { class: "cards" }, cards, panels.ran(report), proved)];
  };

  const KEYWORDS = [
    "plan axis ensemble server source fn input state at start each step every steps phase output load map share",
    "reduce broadcast scatter gather slice exchange elastic over by from into with via per partial split on",
    "batch visit seed tail same shard",
  ]
    .join(" ")
    .replaceAll(" ", "|");
  const WORDS = new RegExp(`(#.*$)|\\b(${KEYWORDS})\\b|(\\b\\d[\\d_.]*\\b)`, "g");

  // A line of a plan as text and colored spans.
  function colored(text) {
    const parts = [];
    let end = 0;
    for (const match of text.matchAll(WORDS)) {
      parts.push(text.slice(end, match.index));
      const kind = match[1] ? "comment" : match[2] ? "word" : "digits";
      parts.push(html("span", { class: `code-${kind}` }, match[0]));
      end = match.index + match[0].length;
    }
    return [...parts, text.slice(end)];
  }

  panels.source = (report, selection) => {
    const spent = new Map();
    let most = 0;
    for (const line of report.lines) {
      if (line.seconds === null) continue;
      spent.set(line.line, (spent.get(line.line) || 0) + line.seconds);
      most = Math.max(most, spent.get(line.line));
    }
    const known = new Set(
      report.graphs.flatMap((graph) => [...graph.nodes, ...graph.edges].map((each) => each.line)),
    );
    const rows = report.source.lines.map(([number, text]) => {
      const time = spent.get(number);
      const active = known.has(number);
      const row = html(
        "div",
        {
          class: active ? "code-line linked" : "code-line",
          "data-line": number,
          ...(active
            ? {
                tabindex: 0,
                role: "button",
                "aria-label": `line ${number}: ${text.trim()}`,
                onmouseenter: () => selection.hover(number),
                onmouseleave: () => selection.hover(0),
                onfocus: () => selection.hover(number),
                onblur: () => selection.hover(0),
                onclick: () => selection.pick(number),
                onkeydown: commplan.onEnter(() => selection.pick(number)),
              }
            : {}),
        },
        html("span", { class: "code-number", "aria-hidden": "true" }, String(number)),
        html("code", {}, colored(text)),
        time
          ? html(
              "span",
              { class: "code-time", title: "all operations of this line, one by one" },
              seconds(time),
            )
          : null,
      );
      if (time) row.style.setProperty("--share", percent(time / most));
      return [number, row];
    });
    const frame = html(
      "div",
      { class: "code-frame", role: "region", "aria-label": "text of the plan" },
      html(
        "div",
        { class: "code" },
        rows.map(([, row]) => row),
      ),
    );
    selection.listen((line) =>
      rows.forEach(([number, row]) => {
        const active = Boolean(line) && number === line;
        row.classList.toggle("active", active);
        if (!active || frame.contains(document.activeElement)) return;
        const [top, bottom] = [row.offsetTop, row.offsetTop + row.offsetHeight];
        if (top < frame.scrollTop || bottom > frame.scrollTop + frame.clientHeight)
          frame.scrollTop = top - frame.clientHeight / 2;
      }),
    );
    return [
      html("div", { class: "code-head" }, html("h3", {}, report.source.name || report.plan)),
      report.source.whole
        ? null
        : remark("The plan's file is missing or has changed: its stages are listed instead."),
      frame,
      leftOut(report.source.left_out),
    ];
  };

  panels.graph = (report, selection) => {
    if (!report.graphs.length)
      return [
        remark("This schedule does not contain the plan that it was compiled from, so there is no graph."),
      ];
    const drawn = report.graphs.map((graph) => commplan.graph(graph, selection));
    selection.listen((line) => drawn.forEach((each) => each.highlight(line)));
    const kinds = [...new Set(report.graphs.flatMap((graph) => graph.nodes.map((node) => node.kind)))];
    const legend = html(
      "ul",
      { class: "legend", "aria-label": "colors" },
      kinds.map((kind) => html("li", {}, html("span", { class: `swatch kind-${kind}` }), kind)),
      html("li", {}, html("span", { class: "swatch kind-value" }), "value: type, placement"),
    );
    return [
      legend,
      html(
        "div",
        { class: "graphs" },
        drawn.map((each) => each.element),
      ),
    ];
  };

  // The rows of an event's tooltip.
  function described(event) {
    const rows = [[null, event.algorithm ? `${event.name} via ${event.algorithm}` : event.name]];
    if (event.line) rows.push(["plan line", String(event.line)]);
    rows.push(["takes", seconds(event.seconds)]);
    if (event.waited) rows.push([`waited for rank ${event.last}`, seconds(event.waited)]);
    if (event.predicted) rows.push(["predicted", seconds(event.predicted)]);
    if (event.count > 1)
      rows.push(["operations", `${event.count.toLocaleString("en")}, busy ${seconds(event.busy)}`]);
    if (event.alone && Math.abs(event.alone - event.busy) > event.busy * 0.005)
      rows.push(["alone", seconds(event.alone)]);
    if (event.bound) rows.push(["lower bound", seconds(event.bound)]);
    if (event.size) rows.push(["whole buffer", bytes(event.size)]);
    for (const [level, size] of busiest(event.nbytes)) rows.push([`busiest ${level} link`, bytes(size)]);
    if (event.result) rows.push(["makes", event.result]);
    return rows;
  }

  panels.time = (report, selection) => {
    const phases = report.phases.filter((phase) => phase.lanes.length);
    const parts = [];
    if (!report.phases.length) parts.push(remark("Times need a machine: give one with --topology."));
    else if (!phases.length) parts.push(remark("No operation has a known time."));
    const shownPhases = phases.length
      ? phases
      : report.traces.map((trace) => ({ name: trace.phase, title: trace.phase, lanes: [], critical: [] }));
    if (!shownPhases.length) return parts;
    const frame = html("div", {});
    const below = html("div", {});
    const shown = [];
    selection.listen((line) => shown.forEach((each) => each.highlight(line)));
    const show = (phase) => {
      const trace = report.traces.find((each) => !each.phase || each.phase === phase.name);
      const known = phase.lanes.length > 0;
      const predicted = phase.lanes.map((lane) => ({ ...lane, group: trace ? "predicted" : "" }));
      const recorded = trace
        ? trace.lanes.map((lane) => ({ ...lane, group: lane.group ? `run: ${lane.group}` : "run" }))
        : [];
      const timeline = commplan.timeline({
        title: known ? `Predicted timeline of ${phase.title}` : "Timeline of a run",
        lanes: [...predicted, ...recorded],
        seconds: known ? phase.seconds : 0,
        describe: described,
        hover: selection.hover,
        pick: selection.pick,
      });
      shown.splice(0, shown.length, timeline);
      frame.replaceChildren(timeline.element);
      timeline.redraw();
      below.replaceChildren(
        ...[
          trace && known ? aligned(timeline, recorded, selection) : null,
          known ? notes(phase) : null,
          trace ? remark(`Recorded by a run: ${trace.name}, ${seconds(trace.seconds)}.${pale(trace)}`) : null,
          trace ? leftOut(trace.left_out) : null,
          phase.critical.length ? critical(phase, report, selection) : null,
        ].filter(Boolean),
      );
    };
    const first = mainPhase(shownPhases, (phase) => phase.name);
    if (shownPhases.length > 1)
      parts.push(
        choice(
          "phase",
          shownPhases.map((phase) => [phase.title, phase]),
          first,
          show,
        ),
      );
    parts.push(
      html(
        "p",
        { class: "hint" },
        "Drag to move, Ctrl and the wheel to zoom; with the keyboard: arrows, + and −, 0 for the whole.",
      ),
    );
    parts.push(frame, below);
    if (report.unknown.length)
      parts.push(
        remark(`Assumed to take no time, costs unknown: ${report.unknown.join(", ")}. Set them with --cost.`),
      );
    show(first);
    return parts;
  };

  // The explanation of pale parts of bars, if a trace has any.
  const pale = (trace) =>
    trace.lanes.some((lane) => lane.events.some((event) => event.waited))
      ? " In the pale part of a bar its rank waits for the last rank to arrive; below it is when its program waits."
      : "";

  // A note on ops that are not in the timeline, or null.
  function notes(phase) {
    const untimed = phase.untimed
      ? `${plural(phase.untimed, "operation")} without a known time ${phase.untimed === 1 ? "is" : "are"} not shown`
      : "";
    return leftOut([untimed, phase.left_out].filter(Boolean).join("; "));
  }

  // Buttons that move a run relative to the prediction: both begin at 0, or the selected line begins together.
  function aligned(timeline, recorded, selection) {
    const groups = [...new Set(recorded.map((lane) => lane.group))];
    const status = html("span", { class: "remark", "aria-live": "polite" });
    const shift = () => {
      const line = selection.selected();
      const predicted = timeline.first("predicted", line);
      const starts = groups.map((group) => timeline.first(group, line)).filter((time) => time !== null);
      if (predicted === null || !starts.length) {
        status.textContent = line ? `line ${line} is not in both` : "select a line first: click on one";
        return;
      }
      const by = predicted - Math.min(...starts);
      groups.forEach((group) => timeline.shift(group, by));
      status.textContent = `the run is moved by ${by < 0 ? "−" : ""}${seconds(Math.abs(by))}`;
    };
    const reset = () => {
      groups.forEach((group) => timeline.shift(group, 0));
      status.textContent = "";
    };
    return html(
      "div",
      { class: "align", role: "group", "aria-label": "where the run begins" },
      html("button", { type: "button", onclick: reset }, "run begins at 0"),
      html("button", { type: "button", onclick: shift }, "align at the selected line"),
      status,
    );
  }

  // Radio buttons that look like tabs; options are [text, value], and act(value) is called for a choice.
  function choice(name, options, first, act) {
    return html(
      "fieldset",
      { class: "tabs" },
      html("legend", { class: "visually-hidden" }, name),
      options.map(([text, value]) =>
        html(
          "label",
          {},
          html("input", {
            type: "radio",
            name: `${name}-${options.length}`,
            checked: value === first,
            onchange: () => act(value),
          }),
          html("span", {}, text),
        ),
      ),
    );
  }

  // The table of the critical path.
  function critical(phase, report, selection) {
    const texts = new Map(report.source.lines);
    const rows = phase.critical.map((part) =>
      html(
        "tr",
        {},
        html("td", {}, lineButton(part.line, selection)),
        cell(part.name),
        cell(seconds(part.seconds), true),
        html("td", { class: "bar-cell" }, share(part.seconds / phase.seconds)),
        html("td", { class: "quoted" }, html("code", {}, (texts.get(part.line) || "").trim())),
      ),
    );
    return html(
      "div",
      {},
      html("h3", {}, "Critical path, summed over buckets"),
      table(["line", "operation", { text: "takes", number: true }, "of the phase", "plan"], rows, {
        label: "critical path",
      }),
    );
  }

  // A bar with a percentage; `part` may exceed 1.
  function share(part) {
    const bar = html("span", { class: "share" }, html("span", { class: "share-text" }, percent(part)));
    bar.style.setProperty("--share", percent(Math.min(1, part)));
    return bar;
  }

  panels.links = (report) => {
    const machine = report.machine;
    if (!machine) return [remark("Links need a machine: give one with --topology.")];
    const drawn = commplan.machine(machine);
    const rows = html("tbody", {});
    const show = (phase) => {
      drawn.show(phase);
      rows.replaceChildren(
        ...machine.levels.map((level) =>
          html(
            "tr",
            {},
            cell(level.name),
            cell(level.count.toLocaleString("en"), true),
            cell(seconds(level.latency), true),
            cell(commplan.rate(level.bandwidth), true),
            cell(level.nbytes[phase] ? bytes(level.nbytes[phase]) : "–", true),
            cell(level.nbytes[phase] ? seconds(level.nbytes[phase] / level.bandwidth) : "–", true),
          ),
        ),
      );
    };
    const busy = machine.phases.map((_, index) => machine.levels.some((level) => level.nbytes[index] > 0));
    const titles = new Map(report.phases.map((phase) => [phase.name, phase.title]));
    const options = machine.phases
      .map((name, index) => [titles.get(name) || name, index])
      .filter(([, index]) => busy[index]);
    const first = options.length ? mainPhase(options, ([, index]) => machine.phases[index])[1] : 0;
    show(first);
    const numbers = ["members", "latency", "bandwidth", "busiest link", "busy"].map((text) => ({
      text,
      number: true,
    }));
    const levels = table(["level", ...numbers], [], { label: "levels of the machine" });
    levels.querySelector("tbody").replaceWith(rows);
    return [
      options.length > 1 ? choice("phase of the links", options, first, show) : null,
      options.length ? null : remark("No phase puts bytes on a link."),
      html(
        "ul",
        { class: "legend" },
        html("li", {}, "Width: bytes (left up, right down). Color: busy time, relative to the busiest link:"),
        [
          ["hot", "two thirds or more"],
          ["warm", "a fifth or more"],
          ["cool", "less"],
          ["idle", "idle"],
        ].map(([kind, text]) => html("li", {}, html("span", { class: `swatch link-${kind}` }), text)),
      ),
      drawn.element,
      levels,
      leftOut(machine.left_out),
    ].filter(Boolean);
  };
})();
