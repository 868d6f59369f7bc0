"use strict";
// The playground: an editor, a worker with the compiler, and the panels of the report.
(async () => {
  const { html, panels } = commplan;
  const root = document.getElementById("workbench");
  const samples = await (await fetch("samples.json")).json();
  const WAIT = 250; // ms after the last key

  const state = html("p", { class: "playground-state", role: "status" }, "starting");
  const editor = commplan.editor({ words: samples.words, change: () => later(), hover: (line) => selection.hover(line) });
  const choice = html(
    "select",
    { "aria-label": "sample", onchange: () => open(samples.plans[choice.selectedIndex]) },
    samples.plans.map((sample) => html("option", {}, sample.name)),
  );
  const format = html("button", { type: "button", class: "playground-format", onclick: () => laidOut() }, "Format");
  const messages = html("div", { class: "playground-messages", "aria-live": "polite" });
  const given = html("textarea", {
    class: "playground-given",
    spellcheck: "false",
    "aria-label": "sizes of axes and shapes of trees, as JSON",
    oninput: () => later(),
  });
  const assumed = html(
    "details",
    { class: "playground-assumed" },
    html("summary", {}, "Sizes and shapes"),
    html("p", {}, "What is not given is made up; what the plan is compiled with now:"),
    html("pre", {}),
    html("p", {}, 'Give some as JSON, such as {"axes": {"data": 8}, "shapes": {"grads": {"w": {"shape": [1024, 1024], "dtype": "f32"}}}}:'),
    given,
  );
  const views = ["Graph", "Lines", "Choices", "Schedule", "Timeline"];
  const pages = views.map((name) =>
    html("div", { class: "playground-view", id: `view-${name.toLowerCase()}`, role: "tabpanel", hidden: name !== "Graph" }),
  );
  const tabs = views.map((name, index) =>
    html(
      "button",
      { type: "button", role: "tab", "aria-controls": pages[index].id, "aria-selected": String(!index), onclick: () => show(index) },
      name,
    ),
  );
  root.replaceChildren(
    html(
      "div",
      { class: "playground-left" },
      html("div", { class: "playground-bar" }, html("label", {}, "Sample ", choice), format, state),
      editor.element,
      messages,
      assumed,
    ),
    html("div", { class: "playground-right" }, html("div", { class: "playground-tabs", role: "tablist" }, tabs), pages),
  );

  function show(index) {
    tabs.forEach((tab, each) => tab.setAttribute("aria-selected", String(each === index)));
    pages.forEach((page, each) => {
      page.hidden = each !== index;
    });
    if (last && stale.has(index)) draw(index);
  }

  const selection = commplan.selection();
  selection.of("editor").listen((line) => editor.highlight(line));

  let sample = null;
  let last = null;
  let stale = new Set();
  const EMPTY = { graphs: [], lines: [], choices: [], phases: [], traces: [], unknown: [], source: { lines: [] } };

  function draw(index) {
    stale.delete(index);
    const chosen = selection.of(index);
    const report = last.document ? { ...EMPTY, ...last.document } : null;
    const nothing = html("p", { class: "remark" }, last.left_out || "This is shown once the plan compiles.");
    const drawn = {
      Graph: () => (last.graphs.length ? panels.graph({ ...EMPTY, graphs: last.graphs }, chosen) : [nothing]),
      Lines: () => (report ? [...panels.lines(report, chosen), html("h3", {}, "As commplan explain prints it"), html("pre", { class: "playground-text" }, last.explanation)] : [nothing]),
      Choices: () => (report ? panels.choices(report, chosen) : [nothing]),
      Schedule: () => (report ? [html("pre", { class: "playground-text" }, last.schedule)] : [nothing]),
      Timeline: () => timeline(chosen),
    }[views[index]]();
    pages[index].replaceChildren(...drawn.flat().filter(Boolean));
  }

  function timeline(chosen) {
    const same = last.digest && last.digest === sample.digest && !given.value.trim();
    const words = same
      ? `On ${sample.machine}, with the shapes of the sample. Computed when this page was built.`
      : "Times are predicted with NumPy, which is not in the browser: the timeline is shown for samples as they are. " +
        "For any other plan, commplan simulate prints it and commplan report draws it.";
    const parts = [html("p", { class: "remark" }, words)];
    return same ? [...parts, ...panels.time({ ...EMPTY, ...sample.report }, chosen)] : parts;
  }

  function message(each) {
    const place = each.span
      ? html("button", { type: "button", class: "place", onclick: () => editor.go(each.span.line, each.span.column) }, `line ${each.span.line}`)
      : null;
    const fix =
      each.fix && html("button", { type: "button", class: "fix", onclick: () => replaced(each.fix) }, ["Fix: ", ...commplan.parts.ticked(each.fix.title)]);
    return html(
      "div",
      { class: `message ${each.severity}` },
      html("p", {}, html("a", { href: `${root.dataset.errors}${each.code}/` }, each.code), " ", place, " ", commplan.parts.ticked(each.message)),
      each.notes.length ? html("ul", {}, each.notes.map((note) => html("li", {}, commplan.parts.ticked(note.text)))) : null,
      fix,
    );
  }

  function replaced({ span, text }) {
    const lines = editor.text().split("\n");
    const before = [...lines.slice(0, span.line - 1), lines[span.line - 1].slice(0, span.column - 1)].join("\n");
    const after = [lines[span.end_line - 1].slice(span.end_column - 1), ...lines.slice(span.end_line)].join("\n");
    editor.set(before + text + after);
    later();
  }

  function laidOut() {
    if (!last || !last.formatted) return;
    editor.set(last.formatted);
    later();
  }

  // Sizes of axes, then leaves of trees: `data = 8`, `grads/layer_0/w : f32[784, 256]`.
  function listed({ axes, shapes }) {
    const leaves = (path, tree) =>
      tree.shape ? [`${path} : ${tree.dtype}[${tree.shape.join(", ")}]`] : Object.entries(tree).flatMap(([name, part]) => leaves(`${path}/${name}`, part));
    const sizes = Object.entries(axes).map(([name, size]) => `${name} = ${size}`);
    return [...sizes, ...Object.entries(shapes).flatMap(([name, tree]) => leaves(name, tree))].join("\n");
  }

  function answered(answer) {
    last = answer;
    const { diagnostics } = answer;
    editor.mark(diagnostics);
    messages.replaceChildren(...diagnostics.map(message));
    format.disabled = !answer.formatted || answer.formatted === editor.text();
    const ms = Math.round(answer.seconds * 1000);
    state.textContent = diagnostics.length ? `${diagnostics.length} to mend (${ms} ms)` : `compiles (${ms} ms)`;
    root.dataset.state = diagnostics.length ? "wrong" : "right";
    if (answer.assumed) assumed.querySelector("pre").textContent = listed(answer.assumed);
    stale = new Set(views.keys());
    draw(pages.findIndex((page) => !page.hidden));
    root.dataset.answered = editor.text() === asked ? "true" : "false";
  }

  let [number, timer, asked, ready, waiting] = [0, 0, "", false, false];
  let worker;

  function start() {
    [ready, waiting] = [false, false];
    worker = new Worker("worker.js", { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.status) state.textContent = `${data.status} …`;
      if (data.ready) [ready, root.dataset.ready] = [true, "true"];
      if (data.ready) ask();
      if (data.failed) state.textContent = `failed: ${data.failed}`;
      if (data.id !== undefined) {
        waiting = false;
        if (data.id !== number) ask();
        else if (data.answer) answered(data.answer);
      }
    };
    worker.onerror = (event) => {
      state.textContent = `failed: ${event.message}`;
    };
  }

  // Chromium (seen in 156) may end the process of the page that follows where a page is left with a worker that loads.
  addEventListener("pagehide", () => worker.terminate());
  addEventListener("pageshow", (event) => {
    if (event.persisted) start();
  });
  start();

  function later() {
    root.dataset.answered = "false";
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT);
  }

  // One request at a time; what was typed meanwhile is asked when the answer has come.
  function ask() {
    if (!ready) return;
    number += waiting ? 1 : 0;
    if (waiting) return;
    let more = {};
    try {
      more = given.value.trim() ? JSON.parse(given.value) : {};
      given.classList.remove("wrong");
    } catch {
      given.classList.add("wrong");
    }
    waiting = true;
    number += 1;
    asked = editor.text();
    worker.postMessage({ id: number, request: { text: asked, axes: more.axes, shapes: more.shapes, sample: sample.shapes } });
  }

  function open(next) {
    sample = next;
    given.value = "";
    editor.set(sample.text);
    selection.release();
    later();
  }

  const wanted = new URLSearchParams(window.location.search).get("sample");
  const first = Math.max(0, samples.plans.findIndex((each) => each.name === wanted));
  choice.selectedIndex = first;
  open(samples.plans[first]);
})();
